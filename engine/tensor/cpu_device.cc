#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/tensor/device.h"
#include "oneapi/tbb/parallel_for.h"
#include "oneapi/tbb/task_arena.h"

namespace espalier {
namespace {

// "max 100000" or "200000 100000" (quota and period in µs); 0 when there is no limit.
double CgroupCpuLimit() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return 0;
  return std::strtod(quota.c_str(), nullptr) / period;
}

std::string ReadCpuModelName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (absl::string_view(line).substr(0, 10) == "model name") {
      return std::string(absl::StripAsciiWhitespace(line.substr(line.find(':') + 1)));
    }
  }
  return "unknown";
}

// Read once: a server has a device for every number of threads.
const std::string& CpuModelName() {
  static const std::string name = ReadCpuModelName();
  return name;
}

class CpuDevice final : public Device {
 public:
  enum class Threads { kShared, kOfInstance };

  CpuDevice(int threads, Threads whose)
      : threads_(threads),
        whose_(whose),
        description_(absl::StrCat("cpu ", CpuModelName(), ", ", threads, " threads")),
        arena_(threads) {}

  std::string Description() const override { return description_; }
  int threads() const override { return threads_; }
  std::span<const kernels::LinearVariant> linear_variants() const override {
    return kernels::LinearVariants();
  }
  bool Runs(const kernels::LinearVariant& variant) const override {
    return variant.arch == kernels::Arch::kCpu;
  }

  std::unique_ptr<Device> ForOneInstance() const override {
    if (whose_ == Threads::kShared) return nullptr;
    return std::make_unique<CpuDevice>(threads_, Threads::kShared);
  }

  kernels::KernelContext MakeContext() const override {
    kernels::KernelContext context;
    context.threads = threads_;
    context.pool = &arena_;
    context.parallel_for = [](void* pool, int64_t n, kernels::KernelContext::Task task, void* arg) {
      static_cast<tbb::task_arena*>(pool)->execute(
          [&] { tbb::parallel_for(int64_t{0}, n, [&](int64_t i) { task(arg, i); }); });
    };
    return context;
  }

 private:
  const int threads_;
  const Threads whose_;
  const std::string description_;
  mutable tbb::task_arena arena_;  // its workers are shared by every context of this device
};

}  // namespace

int AvailableCpus() {
  cpu_set_t set;
  int cpus = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  if (const double limit = CgroupCpuLimit(); limit > 0)
    cpus = std::min(cpus, static_cast<int>(std::ceil(limit)));
  return std::max(cpus, 1);
}

std::unique_ptr<Device> MakeCpuDevice(int threads) {
  return std::make_unique<CpuDevice>(threads > 0 ? threads : AvailableCpus(),
                                     CpuDevice::Threads::kShared);
}

std::unique_ptr<Device> MakeCpuDeviceOfInstances(int threads) {
  return std::make_unique<CpuDevice>(threads, CpuDevice::Threads::kOfInstance);
}

}  // namespace espalier
