#include "clients/cli/device_flags.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace espalier::cli {
namespace {

constexpr int64_t kMaxThreads = 1024;

}  // namespace

std::vector<FlagSpec> WithDeviceFlags(std::vector<FlagSpec> flags) {
  flags.push_back({"device", "cpu|cuda", "What to measure; cuda is the first GPU. Default: cpu."});
  flags.push_back(
      {"cuda_module", "FILE",
       "libespalier_cuda.so. Default: beside the program, in ../lib, or where the linker looks."});
  flags.push_back({"threads", "N", "Threads to measure with. Default: 0, one per usable CPU."});
  return flags;
}

absl::StatusOr<Devices> OpenDevices(const Args& args) {
  absl::StatusOr<int64_t> threads = args.Int("threads", 0, 0, kMaxThreads);
  if (!threads.ok()) return threads.status();
  const std::string device = args.String("device", "cpu");
  if (device != "cpu" && device != "cuda") {
    return absl::InvalidArgumentError(
        absl::StrCat("--device is '", device, "', expected cpu or cuda"));
  }
  DeviceOptions options;
  options.threads = static_cast<int>(*threads);
  options.cuda_module = args.String("cuda_module", "");
  options.mode = device == "cuda" ? DeviceMode::kCuda : DeviceMode::kCpu;
  return espalier::OpenDevices(std::move(options));
}

}  // namespace espalier::cli
