// cuda_stopwatch.h — what work takes on a GPU, as it is served: captured in graphs, replayed in turns, timed by events.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tensor/cuda_device.h"
#include "kernels/base/kernel_context.h"

namespace espalier::planner {

class CudaStopwatch {
 public:
  // ResourceExhausted without memory. The device outlives the stopwatch.
  static absl::StatusOr<std::unique_ptr<CudaStopwatch>> Make(const CudaDevice& device);

  // Whose stream is the stopwatch's.
  const kernels::KernelContext& context() const { return context_; }

  // 20 times what `enqueue` puts on the stream: a launch takes the host 2–3 µs, longer than many kernels, and only inside
  // a graph is the device's own time seen. Under the device's setup_mutex. Errors are those of `enqueue`.
  absl::StatusOr<CudaHandle> Capture(const std::function<absl::Status()>& enqueue) const;

  // µs a time, of each graph: after a warm-up all are replayed in turns, there and back (ABBA); the median counts.
  absl::StatusOr<std::vector<double>> Time(const std::vector<const CudaHandle*>& graphs) const;

 private:
  explicit CudaStopwatch(const CudaDevice& device)
      : device_(device), context_(device.MakeContext()) {}
  absl::StatusOr<float> Replay(const CudaHandle& graph) const;

  const CudaDevice& device_;
  kernels::KernelContext context_;
  CudaHandle stream_, begin_, end_;
};

// Power and so clocks depend on the bits that toggle: 0x3c3c is a common bf16, f16 and f32.
absl::Status FillWithNumbers(const CudaDevice& device, const CudaHandle& memory, void* stream);

}  // namespace espalier::planner
