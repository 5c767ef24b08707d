// device_flags.h — --device, --cuda_module and --threads: where an offline command measures.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "clients/cli/args.h"
#include "engine/tensor/devices.h"

namespace espalier::cli {

// `flags` and the three.
std::vector<FlagSpec> WithDeviceFlags(std::vector<FlagSpec> flags);

// The devices of this machine as the flags say. FailedPrecondition for --device cuda without a usable GPU.
absl::StatusOr<Devices> OpenDevices(const Args& args);

// The one to measure on: the first GPU if there is one, else the CPU.
inline const Device& MeasuringDevice(const Devices& devices) {
  return devices.gpus.empty() ? *devices.cpu : *devices.gpus[0];
}

}  // namespace espalier::cli
