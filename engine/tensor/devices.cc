#include "engine/tensor/devices.h"

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/module_loader.h"

namespace espalier {
namespace {

constexpr char kModuleFile[] = "libespalier_cuda.so";

// Where a package puts the module, seen from the program; else whatever the linker's path has.
std::string FindModule() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  for (const char* beside : {".", "../lib"}) {
    const std::filesystem::path file = program.parent_path() / beside / kModuleFile;
    if (!error && std::filesystem::exists(file, error)) return file.lexically_normal().string();
  }
  return kModuleFile;
}

Devices OpenCpu(int threads) {
  Devices devices;
  devices.cpu = MakeCpuDevice(threads);
  for (int n = 1; n <= AvailableCpus(); ++n) {
    devices.instance_cpus.push_back(MakeCpuDeviceOfInstances(n));
  }
  return devices;
}

absl::StatusOr<Devices> WithoutGpu(Devices devices, DeviceMode mode, std::string why) {
  devices.why_no_gpu = std::move(why);
  if (mode == DeviceMode::kCuda) return absl::FailedPreconditionError(devices.why_no_gpu);
  return devices;
}

}  // namespace

std::string Devices::Description() const {
  if (gpus.empty()) return cpu->Description();
  return gpus.size() == 1 ? gpus[0]->Description()
                          : absl::StrCat(gpus.size(), " x ", gpus[0]->Description());
}

absl::StatusOr<Devices> OpenDevices(DeviceOptions options) {
  if (options.mode == DeviceMode::kCpu) {
    Devices devices = OpenCpu(options.threads);
    devices.why_no_gpu = "the server was started for the CPU only";
    return devices;
  }
  std::string error;
  if (options.cuda_module.empty() && !kernels::cuda::HasCudaDriver()) {
    error = "no NVIDIA driver (libcuda.so.1)";
  } else {
    const std::string path = options.cuda_module.empty() ? FindModule() : options.cuda_module;
    const kernels::cuda::CudaModule* module = kernels::cuda::OpenCudaModule(path, &error);
    if (module != nullptr) return OpenDevices(std::move(options), *module);
    error = absl::StrCat("no CUDA module: ", error);
  }
  Devices devices = OpenCpu(options.threads);
  return WithoutGpu(std::move(devices), options.mode, error);
}

absl::StatusOr<Devices> OpenDevices(DeviceOptions options,
                                    const kernels::cuda::CudaModule& module) {
  Devices devices = OpenCpu(options.threads);
  int count = 0;
  if (const auto status = module.device_count(&count); !status.ok() || count == 0) {
    return WithoutGpu(
        std::move(devices), options.mode,
        absl::StrCat("no usable GPU: ", status.ok() ? "the driver lists none" : status.message));
  }
  std::string refused;
  for (int index = 0; index < count; ++index) {
    auto gpu = CudaDevice::Open(module, {.index = index, .on_lost = options.on_gpu_lost});
    if (gpu.ok()) {
      devices.gpus.push_back(*std::move(gpu));
    } else {
      absl::StrAppend(&refused, refused.empty() ? "" : "; ", gpu.status().message());
    }
  }
  if (devices.gpus.empty()) return WithoutGpu(std::move(devices), options.mode, refused);
  return devices;
}

}  // namespace espalier
