// devices.h — the hardware of this process: the CPU, and the GPUs that the CUDA module finds.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/tensor/cuda_device.h"
#include "engine/tensor/device.h"

namespace espalier {

struct Devices {
  std::unique_ptr<Device> cpu;
  std::vector<std::unique_ptr<Device>> instance_cpus;  // [n − 1]: with n threads for every instance
  std::vector<std::unique_ptr<CudaDevice>> gpus;       // by index
  std::string why_no_gpu;                              // not empty when there is none

  // The CPU for a model whose instances have `threads` threads each, up to AvailableCpus(); 0: they share those of `cpu`.
  const Device& CpuWith(int threads) const {
    return threads == 0 ? *cpu : *instance_cpus[threads - 1];
  }
  // "cuda NVIDIA H200, …" (with "2 x " for two), or the CPU's.
  std::string Description() const;
};

enum class DeviceMode {
  kAuto,  // the GPUs if there are any
  kCpu,   // the module is not even looked for
  kCuda,  // no GPU is an error
};

struct DeviceOptions {
  DeviceMode mode = DeviceMode::kAuto;
  int threads = 0;  // of the CPU; 0: one per CPU
  std::string
      cuda_module;  // libespalier_cuda.so; empty: beside the program, in ../lib, or where the linker looks
  std::function<void(const absl::Status&)> on_gpu_lost;  // see CudaDevice; may be empty
};

// FailedPrecondition when kCuda finds no usable GPU. GPUs that are too old are left out with a reason.
absl::StatusOr<Devices> OpenDevices(DeviceOptions options);
// The same with a module that is open already, for tests.
absl::StatusOr<Devices> OpenDevices(DeviceOptions options, const kernels::cuda::CudaModule& module);

}  // namespace espalier
