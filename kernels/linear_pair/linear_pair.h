// linear_pair.h — y = act2(act1(x · W1ᵀ + b1) · W2ᵀ + b2 + residual) in one kernel: what lies between stays on the chip.
//
// Shapes   first: x [tokens, in], W1 [hidden, in], b1 [hidden] or null; its y is not used.
//          second: W2 [out, hidden], y [tokens, out], b2 [out] or null, residual [tokens, out] or null; its x is not used.
//          Strides as in linear.h.
// Types    CUDA only: x, y and both weights of one two-byte type; the hidden values are rounded to it, as they are when
//          they pass through memory. Accumulation and biases f32.
// Memory   Everything is borrowed, on the device; both weights in the packing kLinearPairPacking. y must not alias x; the
//          residual may be y, as in linear.h.
// Limits   FitsLinearPair; tokens >= 0 (0 is a no-op); no residual of the first layer.
// Errors   kUnsupported for what FitsLinearPair refuses, kInvalidArgument for a broken contract.
// Async    Enqueued on ctx.stream. Thread-safe: no shared state.
// Determinism  Bit-identical for the same x row whatever the batch is.
#pragma once

#include "kernels/base/kernel_context.h"
#include "kernels/base/kernel_status.h"
#include "kernels/linear/linear.h"

namespace espalier::kernels {

struct LinearPairArgs {
  LinearArgs first, second;
};

// LinearVariant::packing of the variants whose bytes a pair reads.
inline constexpr const char* kLinearPairPacking = "cuda_block_image";

// Whether two layers, the second on what the first makes, can run as a pair on `arch`: blocks of 64 rows and 64 or 128
// columns in bf16 or f16 on Hopper, as many of them and as wide as shared memory and registers hold.
bool FitsLinearPair(const LinearDesc& first, const LinearDesc& second, Arch arch);

// Needs KernelContext::ops.
[[nodiscard]] KernelStatus RunLinearPair(const KernelContext& ctx, const LinearPairArgs& args);

}  // namespace espalier::kernels
