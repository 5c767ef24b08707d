// fake_cuda.h — the CUDA module's table over host memory: what the engine does on a GPU, tested without one.
//
// Streams run what is enqueued at once, except while they capture; then it becomes a graph. Linear kernels compute in
// double from the packed images (dense and block images; the others answer kUnsupported, as a kernel whose limits a
// device does not meet). Every stream has a clock that linear kernels advance by `micros`, so that plans are the same on
// every run. One device's threads may share it. Handles are counted, memory has a limit, and the device can break.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>

#include "kernels/cuda/module.h"
#include "tests/testing/fake_ipc.h"

namespace espalier::testing {

struct FakeCuda {
  int devices = 1;
  int compute_major = 9, compute_minor = 0;
  size_t memory_bytes = size_t{1} << 30;
  std::function<double(kernels::cuda::CudaKernel, const kernels::LinearArgs&)> micros;

  // What happened so far.
  std::map<void*, size_t> allocations;  // on the "device"
  int live_handles = 0;                 // pinned memory, streams, events and graphs
  FakeIpc ipc;
  int captures = 0, launches = 0, settles = 0;
  std::map<kernels::cuda::CudaKernel, int> runs;  // of linear kernels
  int pair_runs = 0;                              // of fused pairs of them
  std::map<int, int> launches_of;                 // of graphs, by the device that the thread uses

  bool pins_fail = false;  // of memory that is there already

  // Not empty: the device is lost, and every call answers this.
  std::string broken;
  int breaks_after_launches = -1;  // of graphs; below 0: never

  size_t allocated_bytes() const;

  // The one device of the process, as new. Its module stays valid.
  static FakeCuda& Reset();
  static FakeCuda& Get();
  static const kernels::cuda::CudaModule& Module();
};

// 1 µs, and a millionth of the stored values times tokens: whatever stores less is faster.
double ProportionalMicros(kernels::cuda::CudaKernel kernel, const kernels::LinearArgs& args);

}  // namespace espalier::testing
