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

int64_t FindEntry(const WeightView& weight, const BlockRows& rows, int64_t element) {
  const int64_t I = element / weight.in / weight.block_rows;
  const int64_t J = element % weight.in / weight.block_cols;
  const auto end = rows.entries.begin() + rows.row_begin[I + 1];
  const auto at = std::lower_bound(
      rows.entries.begin() + rows.row_begin[I], end, J,
      [](const BlockEntry& entry, int64_t column) { return entry.column < column; });
  return at != end && at->column == J ? at - rows.entries.begin() : -1;
}

}  // namespace espalier::kernels::cuda
