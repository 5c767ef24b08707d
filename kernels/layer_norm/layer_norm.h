// layer_norm.h — y = (x − mean x) / √(var x + epsilon) · scale + bias, row by row.
//
//   mean x = Σ x / n,  var x = Σ (x − mean x)² / n   (two passes: no cancellation)
//
// Shapes   x, y: [rows, n] contiguous; scale: [n]; bias: [n] or null.
// Types    scale, bias: f32. x, y: CPU f32; GPU f32, f16 or bf16, alike. Sums in f32.
// Memory   Borrowed, nothing allocated. y may be exactly x; no other overlap.
// Limits   rows >= 0 (0 is a no-op), n >= 1.
// Errors   kInvalidArgument outside the limits, kUnsupported for a type that the device lacks.
// Async    CPU: returns when y is written. GPU: enqueued on ctx.stream. Thread-safe: no shared state.
// Determinism  A row depends on itself only: bit-identical whatever rows and threads are.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/kernel_context.h"
#include "kernels/base/kernel_status.h"

namespace espalier::kernels {

struct LayerNormArgs {
  const void* x = nullptr;
  const float* scale = nullptr;
  const float* bias = nullptr;
  void* y = nullptr;
  int64_t rows = 0;
  int64_t n = 1;
  float epsilon = 1e-5f;
  DType dtype = DType::kFloat32;  // of x and y
};
KernelStatus LayerNorm(const KernelContext& ctx, const LayerNormArgs& args);

}  // namespace espalier::kernels
