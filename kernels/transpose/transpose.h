// transpose.h — y = x with its axes permuted.
//
//   y[i0, …] = x[Σ i·strides]
//
// Shapes   y: dims[0 .. rank), contiguous row-major; strides of x along the axes of y, in ELEMENTS.
// Types    any of 1, 2, 4 or 8 bytes: elements are copied, never interpreted.
// Memory   Borrowed, nothing allocated. y must not overlap x.
// Limits   1 <= rank <= kMaxTransposeRank, dims >= 0 (0 elements are a no-op).
// Errors   kInvalidArgument outside the limits.
// Async    CPU: returns when y is written. GPU: enqueued on ctx.stream. Thread-safe: no shared state.
// Determinism  A copy: bit-identical.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/kernel_context.h"
#include "kernels/base/kernel_status.h"

namespace espalier::kernels {

inline constexpr int kMaxTransposeRank = 8;

struct TransposeArgs {
  size_t element_bytes = 4;
  int rank = 1;
  int64_t dims[kMaxTransposeRank] = {};
  int64_t strides[kMaxTransposeRank] = {};
  const void* x = nullptr;
  void* y = nullptr;
};
KernelStatus Transpose(const KernelContext& ctx, const TransposeArgs& args);

}  // namespace espalier::kernels
