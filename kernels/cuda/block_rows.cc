#include "kernels/cuda/block_rows.h"

#include <algorithm>

namespace espalier::kernels::cuda {

int64_t StoredBlocks(const WeightView& weight) {
  return weight.layout == Layout::kDiagonal ? weight.count * weight.diagonal_length()
                                            : weight.count;
}

BlockRows GroupByRow(const WeightView& weight) {
  const int64_t R = weight.block_row_count(), C = weight.block_col_count();
  BlockRows rows;
  rows.row_begin.assign(R + 1, 0);
  rows.entries.resize(StoredBlocks(weight));
  if (weight.layout == Layout::kBlockCsr) {
    std::copy(weight.row_ptr, weight.row_ptr + R + 1, rows.row_begin.begin());
    for (int64_t i = 0; i < weight.count; ++i) {
      rows.entries[i] = {static_cast<int32_t>(weight.Column(i)), static_cast<int32_t>(i)};
    }
    return rows;
  }
  const int64_t D = weight.diagonal_length();
  for (int64_t k = 0; k < weight.count; ++k) {
    for (int64_t t = 0; t < D; ++t) {
      ++rows.row_begin[DiagonalBlock(R, C, weight.offsets[k], t).row + 1];
    }
  }
  for (int64_t r = 0; r < R; ++r) rows.row_begin[r + 1] += rows.row_begin[r];
  std::vector<int32_t> next(rows.row_begin.begin(), rows.row_begin.end() - 1);
  for (int64_t k = 0; k < weight.count; ++k) {
    for (int64_t t = 0; t < D; ++t) {
      const BlockPosition at = DiagonalBlock(R, C, weight.offsets[k], t);
      rows.entries[next[at.row]++] = {static_cast<int32_t>(at.col),
                                      static_cast<int32_t>(k * D + t)};
    }
  }
  for (int64_t r = 0; r < R; ++r) {
    std::sort(rows.entries.begin() + rows.row_begin[r],
              rows.entries.begin() + rows.row_begin[r + 1],
              [](const BlockEntry& a, const BlockEntry& b) { return a.column < b.column; });
  }
  return rows;
}

BlockFinder::Place BlockFinder::Find(int64_t element) {
  if (element >= row_end_) {
    const int64_t row = element / weight_.in;
    row_begin_ = row * weight_.in;
    row_end_ = row_begin_ + weight_.in;
    row_in_block_ = row % weight_.block_rows;
    next_ = rows_.row_begin[row / weight_.block_rows];
    end_ = rows_.row_begin[row / weight_.block_rows + 1];
  }
  const auto col = static_cast<uint32_t>(element - row_begin_);
  const auto block_cols = static_cast<uint32_t>(weight_.block_cols);
  const auto column = static_cast<int32_t>(col / block_cols);
  const auto entries = rows_.entries.begin();
  if (next_ < end_ && entries[next_].column < column) {
    next_ = static_cast<int32_t>(
        std::lower_bound(entries + next_, entries + end_, column,
                         [](const BlockEntry& entry, int32_t at) { return entry.column < at; }) -
        entries);
  }
  const bool is_stored = next_ < end_ && entries[next_].column == column;
  return {is_stored ? next_ : -1, row_in_block_, col % block_cols};
}

}  // namespace espalier::kernels::cuda
