// device.h — the one interface between the engine and the hardware it runs on. CPU is built in; a GPU (cuda_device.h)
// comes from a module that is opened at start-up.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "engine/tensor/buffer.h"
#include "kernels/base/kernel_context.h"
#include "kernels/linear/linear.h"

namespace espalier {

class CudaDevice;

class Device {
 public:
  virtual ~Device() = default;
  // What tells one machine's timings from another's in a plan cache: "cpu AMD EPYC 9B14 avx512 2 threads".
  virtual std::string Description() const = 0;
  virtual int threads() const = 0;
  // A context for one caller at a time; valid while the device lives.
  virtual kernels::KernelContext MakeContext() const = 0;
  // The same device with threads that only its owner uses, for one instance of a model; null where contexts share them.
  virtual std::unique_ptr<Device> ForOneInstance() const { return nullptr; }

  // The linear kernels to choose from; those that another architecture needs are among them.
  virtual std::span<const kernels::LinearVariant> linear_variants() const = 0;
  // Whether `variant`, one of the above, runs here.
  virtual bool Runs(const kernels::LinearVariant& variant) const = 0;
  // This device as a GPU; null for the CPU.
  virtual const CudaDevice* AsCudaOrNull() const { return nullptr; }
};

// The host CPU with `threads` threads over oneTBB; 0 means one per CPU that the cgroup's cpu.max and the affinity mask
// allow. One thread runs kernels inline in the caller.
std::unique_ptr<Device> MakeCpuDevice(int threads);
// A CPU that gives every instance of a model `threads` threads of its own. The threads come from one pool of the process, so
// that never more run than there are CPUs, and those that call.
std::unique_ptr<Device> MakeCpuDeviceOfInstances(int threads);

// CPUs usable by this process: min(affinity mask, ceil(cgroup cpu.max quota)), at least 1.
int AvailableCpus();

}  // namespace espalier
