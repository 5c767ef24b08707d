// csr_linear.h — y = act(x · Wᵀ + b + residual) for a weight stored as compressed sparse rows, on the CPU.
//
//   y[row] = Σ_i values[i] · x[col_idx[i]],   i in [row_ptr[row], row_ptr[row + 1]), ascending, one FMA each
//
// Tokens are vector lanes (panel-inl.h): a value is broadcast and meets a contiguous piece of x, so that
// scattered columns need no gathers. Up to 16 tokens several rows advance together, which hides the
// latency of one FMA after another; more tokens go through tiles of columns whose x stays in L1. Every
// row adds in the same order either way: y is bit-identical whatever tokens and threads are.
//
// Packed   Nothing: reads the arrays as they are.
#pragma once

#include "kernels/linear/linear.h"

namespace espalier::kernels {

struct CsrLinearCpu {
  static bool Supports(const LinearDesc& desc);
  static size_t PackedBytes(const WeightView& weight);
  static KernelStatus Pack(const WeightView& weight, void* packed);
  static KernelStatus Locate(const WeightView& weight, std::span<const int64_t> elements,
                             int64_t* offsets);
  static size_t ScratchBytes(const LinearDesc& desc, int threads);
  static KernelStatus Run(const KernelContext& ctx, const LinearArgs& args);
};

}  // namespace espalier::kernels
