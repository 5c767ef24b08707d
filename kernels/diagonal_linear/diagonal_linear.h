// diagonal_linear.h — y = act(x · Wᵀ + b + residual) for a weight stored as cyclic (block-)diagonals, on the CPU.
//
//   y[row] = Σ_k values[k, t] · x[col],   (row, col) as in weight_view.h, in ascending k, one FMA each
//
// Along t both the values and x are contiguous, so there is no gather and no index per value: few
// tokens take rows as vector lanes, many tokens take tokens as lanes (panel-inl.h). Both add in the
// same order, so that y is bit-identical whatever tokens and threads are. The tile of y stays in
// registers across all diagonals.
//
// Packed   The values in the order they are used, nothing added but 64 bytes that loads may run into:
//          [tile of kDiagonalTileRows rows][diagonal][row of the tile]. Where out > in a diagonal
//          meets only some rows of a tile: the pieces are stored back to back, and a table of where
//          every tile starts comes first.
#pragma once

#include "kernels/linear/linear.h"

namespace espalier::kernels {

// b = 1.
struct DiagonalLinearCpu {
  static bool Supports(const LinearDesc& desc);
  static size_t PackedBytes(const WeightView& weight);
  static KernelStatus Pack(const WeightView& weight, void* packed);
  static KernelStatus Locate(const WeightView& weight, std::span<const int64_t> elements,
                             int64_t* offsets);
  static size_t ScratchBytes(const LinearDesc& desc, int threads);
  static KernelStatus Run(const KernelContext& ctx, const LinearArgs& args);
};

// The same for block-diagonals (b > 1, rectangular blocks too), summed block after block in ascending k.
//
// Packed   As block_csr_linear.h packs the blocks, block rows one after the other, diagonals ascending.
//          No index is stored.
struct BlockDiagonalLinearCpu {
  static bool Supports(const LinearDesc& desc);
  static size_t PackedBytes(const WeightView& weight);
  static KernelStatus Pack(const WeightView& weight, void* packed);
  static KernelStatus Locate(const WeightView& weight, std::span<const int64_t> elements,
                             int64_t* offsets);
  static size_t ScratchBytes(const LinearDesc& desc, int threads);
  static KernelStatus Run(const KernelContext& ctx, const LinearArgs& args);
};

}  // namespace espalier::kernels
