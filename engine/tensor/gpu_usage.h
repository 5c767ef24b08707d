// gpu_usage.h — how busy GPUs are, from NVML, which the driver brings: opened with dlopen, so that nothing is linked to it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "engine/tensor/cuda_device.h"

namespace espalier {

struct GpuUsage {
  double utilization =
      0;  // share of the last sampling period (up to a second) in which a kernel ran, 0 to 1
  uint64_t memory_used_bytes = 0, memory_total_bytes = 0;  // by all processes
  double power_watts = 0;
};

// Thread-safe, as NVML is.
class GpuUsageReader {
 public:
  virtual ~GpuUsageReader() = default;
  // False when the driver does not answer (a lost device); single values that it does not know stay 0.
  virtual bool Read(const CudaDevice& gpu, GpuUsage* usage) const = 0;
};

// Null without NVML; `library` as dlopen takes it.
std::unique_ptr<GpuUsageReader> OpenGpuUsageReader(
    const std::string& library = "libnvidia-ml.so.1");

}  // namespace espalier
