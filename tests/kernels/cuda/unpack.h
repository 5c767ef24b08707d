// unpack.h — the inverse of packing, written from the headers' words rather than from the packers' code.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/kernels/cuda/random_weight.h"

namespace espalier::kernels::testing {

// Value (r, c) of a panel of `columns` columns: a row's 16-byte chunks are exchanged by XOR with the row number (64
// columns), half (32) or a quarter of it (16).
inline uint16_t PanelValue(const char* panel, int columns, int r, int c) {
  const int chunks = columns / 8, key = r * columns / 64 % chunks;
  uint16_t value;
  std::memcpy(&value, panel + r * columns * 2 + ((c / 8) ^ key) * 16 + c % 8 * 2, 2);
  return value;
}

// The weight as a dense [out, in] matrix of its values: uint16_t, or float.
template <typename Value = uint16_t>
std::vector<Value> DenseOf(const RandomWeight& weight) {
  const WeightView w = weight.view();
  const auto* values = reinterpret_cast<const Value*>(weight.values.data());
  const int64_t R = w.block_row_count(), C = w.block_col_count(), D = w.diagonal_length();
  std::vector<Value> dense(w.out * w.in, 0);
  const auto put = [&](int64_t block_row, int64_t block_col, int64_t block) {
    for (int64_t r = 0; r < w.block_rows; ++r) {
      for (int64_t c = 0; c < w.block_cols; ++c) {
        const int64_t row = block_row * w.block_rows + r, column = block_col * w.block_cols + c;
        if (row < w.out && column < w.in) {
          dense[row * w.in + column] = values[(block * w.block_rows + r) * w.block_cols + c];
        }
      }
    }
  };
  if (w.layout == Layout::kDiagonal) {
    for (int64_t k = 0; k < w.count; ++k) {
      for (int64_t t = 0; t < D; ++t) {
        const BlockPosition at = DiagonalBlock(R, C, w.offsets[k], t);
        put(at.row, at.col, k * D + t);
      }
    }
  } else {
    for (int64_t row = 0; row < R; ++row) {
      for (int32_t i = w.row_ptr[row]; i < w.row_ptr[row + 1]; ++i) put(row, w.col_idx[i], i);
    }
  }
  return dense;
}

}  // namespace espalier::kernels::testing
