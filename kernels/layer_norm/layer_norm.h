// layer_norm.h — y = (x − mean x) / √(var x + epsilon) · scale + bias, row by row.
//
//   mean x = Σ x / n,  var x = Σ (x − mean x)² / n   (two passes: no cancellation)
//
// Shapes   x, y: [rows, n] contiguous; scale: [n]; bias: [n] or null.
// Types    f32, sums in f32 over vector lanes.
// Memory   Borrowed, nothing allocated. y may be exactly x; no other overlap.
// Limits   rows >= 0 (0 is a no-op), n >= 1.
// Errors   kInvalidArgument outside the limits, kUnsupported for an arch other than kCpu.
// Async    CPU: returns when y is written. Thread-safe: no shared state.
// Determinism  A row depends on itself only: bit-identical whatever rows and threads are.
#pragma once

#include <cstdint>

#include "kernels/base/kernel_context.h"
#include "kernels/base/kernel_status.h"

namespace espalier::kernels {

struct LayerNormArgs {
  const float* x = nullptr;
  const float* scale = nullptr;
  const float* bias = nullptr;
  float* y = nullptr;
  int64_t rows = 0;
  int64_t n = 1;
  float epsilon = 1e-5f;
};
KernelStatus LayerNorm(const KernelContext& ctx, const LayerNormArgs& args);

}  // namespace espalier::kernels
