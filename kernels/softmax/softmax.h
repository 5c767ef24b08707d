// softmax.h — y = e^(x − max x) / Σ e^(x − max x) along one axis.
//
// Shapes   x, y: [outer, n, inner] contiguous; the axis is the middle one (inner = 1: rows).
// Types    f32, sum in f32 over vector lanes.
// Memory   Borrowed, nothing allocated. y may be exactly x; no other overlap.
// Limits   outer, inner >= 0 (0 elements are a no-op), n >= 1.
// Errors   kInvalidArgument outside the limits, kUnsupported for an arch other than kCpu.
// Accuracy  Relative error below (6 + n / 16) · 2⁻²⁴ where e^(x − max x) is a normal number, 0
//          below that. A row of −∞ only, or with NaN or +∞, gives NaN as the formula does.
// Async    CPU: returns when y is written. Thread-safe: no shared state.
// Determinism  A row depends on itself only: bit-identical whatever outer and threads are.
#pragma once

#include <cstdint>

#include "kernels/base/kernel_context.h"
#include "kernels/base/kernel_status.h"

namespace espalier::kernels {

struct SoftmaxArgs {
  const float* x = nullptr;
  float* y = nullptr;
  int64_t outer = 0;
  int64_t n = 1;
  int64_t inner = 1;
};
KernelStatus Softmax(const KernelContext& ctx, const SoftmaxArgs& args);

}  // namespace espalier::kernels
