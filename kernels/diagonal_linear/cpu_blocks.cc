// cpu_blocks.cc — block-diagonals run as the block rows they are: the packed values are those of
// block_csr_linear, and the column of each block follows from its diagonal's offset, so that no index
// is kept. Writing the indices down costs one addition per block against b² multiplications a token.
#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "kernels/block_csr_linear/block_csr_linear.h"
#include "kernels/block_csr_linear/strips.h"
#include "kernels/diagonal_linear/diagonal_linear.h"

namespace espalier::kernels {
namespace {

int64_t BlocksOf(const LinearDesc& desc) {
  const int64_t R = (desc.out + desc.block_rows - 1) / desc.block_rows;
  const int64_t C = (desc.in + desc.block_cols - 1) / desc.block_cols;
  return desc.count * std::min(R, C);
}

int64_t RowPtrBytes(const LinearDesc& desc) {
  const int64_t R = (desc.out + desc.block_rows - 1) / desc.block_rows;
  return ((R + 1) * 4 + 63) / 64 * 64;
}

int64_t IndexBytes(const LinearDesc& desc) {
  return RowPtrBytes(desc) + (BlocksOf(desc) * 2 + 63) / 64 * 64;
}

// Calls fn(k, t, col) for each block of block row `row`, diagonals ascending.
template <typename Fn>
void ForEachBlock(const WeightView& w, int64_t row, Fn fn) {
  const int64_t R = w.block_row_count(), C = w.block_col_count();
  for (int64_t k = 0; k < w.count; ++k) {
    int64_t col = R >= C ? row - w.offsets[k] : row + w.offsets[k];
    if (R >= C) {
      if (col < 0) col += R;
      if (col < C) fn(k, col, col);
    } else {
      if (col >= C) col -= C;
      fn(k, row, col);
    }
  }
}

// The same blocks as block_csr, but by name: BlockCsrLinearCpu packs no columns of a diagonal. row_ptr: [R + 1],
// col_idx: [K · D].
WeightView AsBlockCsr(const WeightView& w, int32_t* row_ptr, uint16_t* col_idx) {
  int32_t count = 0;
  row_ptr[0] = 0;
  for (int64_t row = 0; row < w.block_row_count(); ++row) {
    ForEachBlock(w, row, [&](int64_t, int64_t, int64_t col) {
      col_idx[count++] = static_cast<uint16_t>(col);
    });
    row_ptr[row + 1] = count;
  }
  WeightView blocks = w;
  blocks.count = count;
  blocks.row_ptr = row_ptr;
  blocks.col_idx16 = col_idx;
  blocks.offsets = nullptr;
  return blocks;
}

}  // namespace

bool BlockDiagonalLinearCpu::Supports(const LinearDesc& desc) {
  return desc.block_rows >= 1 && desc.block_cols >= 1 && desc.block_rows * desc.block_cols > 1 &&
         desc.count >= 0 && FitsColumnIndex16(desc.in, desc.block_cols) &&
         BlocksOf(desc) <= std::numeric_limits<int32_t>::max();
}

size_t BlockDiagonalLinearCpu::PackedBytes(const WeightView& weight) {
  WeightView blocks = weight;
  blocks.count = weight.count * weight.diagonal_length();
  return BlockCsrLinearCpu::PackedBytes(blocks);
}

KernelStatus BlockDiagonalLinearCpu::Pack(const WeightView& weight, void* packed) try {
  const int64_t count = weight.count * weight.diagonal_length();
  const size_t block_bytes =
      static_cast<size_t>(weight.block_rows) * weight.block_cols * SizeOf(weight.dtype);
  std::vector<int32_t> row_ptr(weight.block_row_count() + 1);
  std::vector<uint16_t> col_idx(count);
  WeightView blocks = AsBlockCsr(weight, row_ptr.data(), col_idx.data());
  std::vector<std::byte> values(count * block_bytes);
  std::byte* to = values.data();
  for (int64_t row = 0; row < weight.block_row_count(); ++row) {
    ForEachBlock(weight, row, [&](int64_t k, int64_t t, int64_t) {
      const auto* from = static_cast<const std::byte*>(weight.values);
      std::memcpy(to, from + (k * weight.diagonal_length() + t) * block_bytes, block_bytes);
      to += block_bytes;
    });
  }
  blocks.values = values.data();
  return BlockCsrLinearCpu::Pack(blocks, packed);
} catch (const std::bad_alloc&) {
  return {KernelCode::kOutOfMemory, "diagonal_linear: no memory to reorder the blocks in"};
}

KernelStatus BlockDiagonalLinearCpu::Locate(const WeightView& weight,
                                            std::span<const int64_t> elements,
                                            int64_t* offsets) try {
  const int64_t R = weight.block_row_count(), C = weight.block_col_count();
  std::vector<int32_t> row_ptr(R + 1);
  std::vector<uint16_t> col_idx(weight.count * weight.diagonal_length());
  const WeightView blocks = AsBlockCsr(weight, row_ptr.data(), col_idx.data());
  const BlockStrips strips(blocks);
  const int32_t* const diagonals_end = weight.offsets + weight.count;
  std::vector<int64_t> slots(weight.count);  // of the diagonals in block row `listed`
  int64_t listed = -1;
  for (const int64_t element : elements) {
    const int64_t row = element / weight.in, col = element % weight.in;
    const int64_t I = row / weight.block_rows, J = col / weight.block_cols;
    if (I != listed) {
      int64_t slot = 0;
      ForEachBlock(weight, I, [&](int64_t k, int64_t, int64_t) { slots[k] = slot++; });
      listed = I;
    }
    const int64_t offset = R >= C ? (I - J + R) % R : (J - I + C) % C;
    const int32_t* at = std::lower_bound(weight.offsets, diagonals_end, offset);
    const bool stored = at != diagonals_end && *at == offset;
    *offsets++ = stored ? strips.Index(row, slots[at - weight.offsets], col) *
                              static_cast<int64_t>(SizeOf(weight.dtype))
                        : -1;
  }
  return {};
} catch (const std::bad_alloc&) {
  return {KernelCode::kOutOfMemory, "diagonal_linear: no memory to list the blocks in"};
}

size_t BlockDiagonalLinearCpu::ScratchBytes(const LinearDesc& desc, int threads) {
  return IndexBytes(desc) + BlockCsrLinearCpu::ScratchBytes(desc, threads);
}

KernelStatus BlockDiagonalLinearCpu::Run(const KernelContext& ctx, const LinearArgs& args) {
  const LinearDesc desc = DescOf(args.weight, args.tokens);
  std::byte* const scratch = static_cast<std::byte*>(args.scratch);
  LinearArgs blocks = args;
  blocks.weight = AsBlockCsr(args.weight, reinterpret_cast<int32_t*>(scratch),
                             reinterpret_cast<uint16_t*>(scratch + RowPtrBytes(desc)));
  blocks.scratch = scratch + IndexBytes(desc);
  return BlockCsrLinearCpu::Run(ctx, blocks);
}

}  // namespace espalier::kernels
