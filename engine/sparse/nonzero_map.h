// nonzero_map.h — which cells of a matrix are non-zero, one bit each: what structure detection
// reads instead of the weight. At 1/32 (f32) or 1/16 of the weight's bytes, every question about
// blocks and diagonals of any size costs a few milliseconds where reading the weight again would
// cost hundreds.
//
// Bit c mod 64 of word c / 64 of a row is column c. Bits beyond the last column are zero.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace espalier::sparse {

class NonzeroMap {
 public:
  NonzeroMap(int64_t rows, int64_t cols)
      : rows_(rows), cols_(cols), words_((cols + 63) / 64), bits_(rows * words_) {}

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t words_per_row() const { return words_; }
  uint64_t* row(int64_t r) { return bits_.data() + r * words_; }
  const uint64_t* row(int64_t r) const { return bits_.data() + r * words_; }

  int64_t Count() const;

  // The map of row_factor × col_factor blocks: a cell is set when any of its block is. Both factors
  // are powers of two.
  NonzeroMap Coarsen(int row_factor, int col_factor) const;

  // Per cyclic diagonal offset of weight_view.h (max(rows, cols) of them): does it hold a set cell?
  std::vector<bool> Diagonals() const;

  // Calls fn(row, col) for every set cell, row by row.
  template <typename Fn>
  void ForEach(Fn&& fn) const {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t w = 0; w < words_; ++w) {
        for (uint64_t word = row(r)[w]; word != 0; word &= word - 1) {
          fn(r, w * 64 + std::countr_zero(word));
        }
      }
    }
  }

 private:
  NonzeroMap HalveRows() const;
  NonzeroMap HalveCols() const;

  int64_t rows_, cols_, words_;
  std::vector<uint64_t> bits_;
};

}  // namespace espalier::sparse
