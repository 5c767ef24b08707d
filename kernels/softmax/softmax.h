// softmax.h — y = e^(x − max x) / Σ e^(x − max x) along one axis.
//
// Shapes   x, y: [outer, n, inner] contiguous; the axis is the middle one (inner = 1: rows).
// Types    CPU: f32. GPU: f32, f16 or bf16, x and y alike. Sum in f32.
// Memory   Borrowed, nothing allocated. y may be exactly x; no other overlap.
// Limits   outer, inner >= 0 (0 elements are a no-op), n >= 1.
// Errors   kInvalidArgument outside the limits, kUnsupported for a type that the device lacks.
// Accuracy  Relative error below (6 + n / 16) · 2⁻²⁴ where e^(x − max x) is a normal number, 0
//          below that. A row of −∞ only, or with NaN or +∞, gives NaN as the formula does.
// Async    CPU: returns when y is written. GPU: enqueued on ctx.stream. Thread-safe: no shared state.
// Determinism  A row depends on itself only: bit-identical whatever outer and threads are.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/kernel_context.h"
#include "kernels/base/kernel_status.h"

namespace espalier::kernels {

struct SoftmaxArgs {
  const void* x = nullptr;
  void* y = nullptr;
  int64_t outer = 0;
  int64_t n = 1;
  int64_t inner = 1;
  DType dtype = DType::kFloat32;
};
KernelStatus Softmax(const KernelContext& ctx, const SoftmaxArgs& args);

}  // namespace espalier::kernels
