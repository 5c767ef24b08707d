// dense_matmul.h — y = act(x · Wᵀ + b + residual) by cuBLASLt: the baseline that every sparse kernel has to beat, and the fallback.
//
// Shapes   as linear.h; W packed row-major [out, round_up(in, 64)], tail zero.
// Types    f32, bf16, f16 for x, W and y alike; f32 strictly, or through TF32 when asked.
// Epilogue none, relu and gelu_tanh are cuBLASLt's own, with the bias rounded to the type of y; the other activations are
//          a second pass over y. The residual is the library's C, with beta 1: added before y is rounded.
// Settle   times the library's best heuristics on the real buffers and keeps the fastest for this problem. Do it before
//          a graph is captured; without it the first heuristic is taken.
// Memory   Plans are small and kept for the life of the process. The workspace is the caller's scratch.
#pragma once

#include <cstddef>

#include "kernels/base/kernel_context.h"
#include "kernels/base/kernel_status.h"
#include "kernels/linear/linear.h"

namespace espalier::kernels::cuda {

enum class DenseMath : uint8_t { kStrict, kTf32 };

KernelStatus DenseMatmul(const KernelContext& ctx, const LinearArgs& args, DenseMath math);

// Overwrites y, a residual in its memory too.
KernelStatus SettleDenseMatmul(const KernelContext& ctx, const LinearArgs& args, DenseMath math);

}  // namespace espalier::kernels::cuda
