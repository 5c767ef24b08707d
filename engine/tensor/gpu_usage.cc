#include "engine/tensor/gpu_usage.h"

#include <dlfcn.h>

#include "absl/strings/str_format.h"

namespace espalier {
namespace {

// The part of NVML's C interface that is used here, as its documentation gives it (nvml.h is not needed to build).
using NvmlDevice = void*;
struct NvmlUtilization {
  unsigned gpu, memory;  // percent
};
struct NvmlMemory {
  unsigned long long total, free, used;  // bytes
};
using Init = int (*)();
using HandleByBusId = int (*)(const char*, NvmlDevice*);
using UtilizationRates = int (*)(NvmlDevice, NvmlUtilization*);
using MemoryInfo = int (*)(NvmlDevice, NvmlMemory*);
using PowerUsage = int (*)(NvmlDevice, unsigned* milliwatts);

class Nvml final : public GpuUsageReader {
 public:
  // The library stays open for the life of the process.
  explicit Nvml(void* library)
      : handle_(Find<HandleByBusId>(library, "nvmlDeviceGetHandleByPciBusId_v2")),
        utilization_(Find<UtilizationRates>(library, "nvmlDeviceGetUtilizationRates")),
        memory_(Find<MemoryInfo>(library, "nvmlDeviceGetMemoryInfo")),
        power_(Find<PowerUsage>(library, "nvmlDeviceGetPowerUsage")) {
    const auto init = Find<Init>(library, "nvmlInit_v2");
    usable_ = init != nullptr && handle_ != nullptr && utilization_ != nullptr &&
              memory_ != nullptr && power_ != nullptr && init() == 0;
  }
  bool usable() const { return usable_; }

  bool Read(const CudaDevice& gpu, GpuUsage* usage) const override {
    const auto& info = gpu.info();
    const std::string bus =
        absl::StrFormat("%08X:%02X:%02X.0", info.pci_domain, info.pci_bus, info.pci_device);
    NvmlDevice device = nullptr;
    if (handle_(bus.c_str(), &device) != 0) return false;
    NvmlUtilization utilization = {};
    NvmlMemory memory = {};
    unsigned milliwatts = 0;
    *usage = {};
    if (utilization_(device, &utilization) == 0) usage->utilization = utilization.gpu / 100.0;
    if (memory_(device, &memory) == 0) {
      usage->memory_used_bytes = memory.used;
      usage->memory_total_bytes = memory.total;
    }
    if (power_(device, &milliwatts) == 0) usage->power_watts = milliwatts / 1000.0;
    return true;
  }

 private:
  template <typename Function>
  static Function Find(void* library, const char* name) {
    return reinterpret_cast<Function>(dlsym(library, name));
  }

  const HandleByBusId handle_;
  const UtilizationRates utilization_;
  const MemoryInfo memory_;
  const PowerUsage power_;
  bool usable_ = false;
};

}  // namespace

std::unique_ptr<GpuUsageReader> OpenGpuUsageReader(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return nullptr;
  auto reader = std::make_unique<Nvml>(handle);
  if (!reader->usable()) return nullptr;
  return reader;
}

}  // namespace espalier
