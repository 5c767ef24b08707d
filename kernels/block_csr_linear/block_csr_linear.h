// block_csr_linear.h — y = act(x · Wᵀ + b + residual) for a weight stored as blocks (block_csr, any block shape), on the CPU.
//
//   y[row] = Σ values[block, r, c] · x[col],  blocks of the block row in ascending order, c ascending, one FMA each
//
// Few tokens take rows as vector lanes: a column of a block times one broadcast x. Many tokens take
// tokens as lanes (panel-inl.h): one broadcast weight times a row of the panel. Both add in the same
// order, so that y is bit-identical whatever tokens and threads are. The tile of y stays in registers
// across all blocks of a block row, and both read the weights as one stream.
//
// Limits   65,536 block columns: the index is WeightView::col_idx16.
// Packed   The values in the order they are used,
//          [block row][strip of up to kStripRows rows][block][column][row of the strip];
//          if PacksColumns, block_steps.h; and 64 bytes that loads may run into.
#pragma once

#include "kernels/linear/linear.h"

namespace espalier::kernels {

struct BlockCsrLinearCpu {
  // Whether the packed form has the block columns, so that the owner may free WeightView's: of blocks so small (4 x 4
  // values of 16 bits) that a column of 16 bits would add more than 5 % to each. Not of narrow ones, which have too little
  // to do for a step: 16 x 1 in bf16 would take 20–40 % longer at one token and 90 % zeros or more.
  static bool PacksColumns(const WeightView& weight) {
    return weight.layout == Layout::kBlockCsr && SizeOf(weight.dtype) == 2 &&
           weight.block_rows * weight.block_cols <= 16 && weight.block_cols >= 4 &&
           FitsColumnIndex16(weight.in, weight.block_cols);
  }

  static bool Supports(const LinearDesc& desc);
  static size_t PackedBytes(const WeightView& weight);
  static KernelStatus Pack(const WeightView& weight, void* packed);
  static KernelStatus Locate(const WeightView& weight, std::span<const int64_t> elements,
                             int64_t* offsets);
  static size_t ScratchBytes(const LinearDesc& desc, int threads);
  static KernelStatus Run(const KernelContext& ctx, const LinearArgs& args);
};

}  // namespace espalier::kernels
