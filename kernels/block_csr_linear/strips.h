// strips.h — how block rows are cut into strips of rows, where each strip's weights lie, and how strips
// are shared out among tasks. Used by packing and by the kernels of every instruction set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/block_csr_linear/block_steps.h"
#include "kernels/linear/linear.h"

namespace espalier::kernels {

// Two AVX-512 vectors of rows with few tokens; the values of a strip are what one pass streams.
inline constexpr int64_t kStripRows = 32;

// The weights of one strip: blocks of [block_cols][packed_rows] back to back.
struct BlockStrip {
  int64_t row;          // of W, the strip's first
  int64_t rows;         // inside W; may be <= 0 in a block row that sticks out
  int64_t packed_rows;  // stored
  int64_t first;        // its first value in the packed weight
  int64_t blocks;
  const uint16_t* cols;  // block columns; null where they are packed
};

class BlockStrips {
 public:
  explicit BlockStrips(const WeightView& weight)
      : w_(weight), strips_((weight.block_rows + kStripRows - 1) / kStripRows) {}

  int64_t count() const { return w_.block_row_count() * strips_; }

  BlockStrip At(int64_t index) const {
    const int64_t block_row = index / strips_, top = index % strips_ * kStripRows;
    BlockStrip strip;
    strip.row = block_row * w_.block_rows + top;
    strip.packed_rows = std::min(kStripRows, w_.block_rows - top);
    strip.rows = std::min(strip.packed_rows, w_.out - strip.row);
    strip.blocks = BlocksBefore(block_row + 1) - BlocksBefore(block_row);
    strip.first = (BlocksBefore(block_row) * w_.block_rows + strip.blocks * top) * w_.block_cols;
    strip.cols = w_.col_idx16 == nullptr ? nullptr : w_.col_idx16 + BlocksBefore(block_row);
    return strip;
  }

  // Where element (row, col), in block `slot` of its block row, lies in the packed weight.
  int64_t Index(int64_t row, int64_t slot, int64_t col) const {
    const BlockStrip strip = At(row / w_.block_rows * strips_ + row % w_.block_rows / kStripRows);
    const int64_t column = slot * w_.block_cols + col % w_.block_cols;
    return strip.first + column * strip.packed_rows + row - strip.row;
  }

  // Strips [Boundary(i, n), Boundary(i + 1, n)) are the i-th of n shares of about equal work.
  int64_t Boundary(int64_t i, int64_t n) const {
    const int64_t all = Work(count()) * i;
    int64_t low = 0, high = count();
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (Work(middle) * n < all) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

 private:
  int64_t BlocksBefore(int64_t block_row) const {
    return w_.count == 0 ? 0 : w_.row_ptr[block_row];
  }
  // Of the strips before `index`: a block of each is one unit, and writing y another.
  int64_t Work(int64_t index) const {
    const int64_t block_row = index / strips_, part = index % strips_;
    int64_t blocks = BlocksBefore(block_row) * strips_;
    if (part > 0) blocks += (BlocksBefore(block_row + 1) - BlocksBefore(block_row)) * part;
    return blocks + index;
  }

  const WeightView& w_;
  int64_t strips_;
};

// The block columns of strips that follow each other, whichever way they are kept: Begin, then Next for each block. What
// it returns says where the block's part of x begins (From) and how much of x is left there (Left). x has `in` rows of
// kWidth values, and `behind` is where it goes on behind the last block.
struct ColumnIndex {
  const uint16_t* at;

  static ColumnIndex First(const WeightView&, int64_t /*strip*/) { return {nullptr}; }
  void Begin(const BlockStrip& strip) { at = strip.cols; }
  ColumnIndex Rest() const { return {nullptr}; }  // each strip knows its own

  template <int kWidth>
  int64_t Next(int64_t block_cols, const float* /*behind*/) {
    return *at++ * block_cols;
  }
  template <int kWidth>
  static int64_t Left(int64_t col, const float* /*x*/, int64_t in) {
    return in - col;
  }
  template <int kWidth>
  static const float* From(int64_t col, const float* x) {
    return x + col * kWidth;
  }
};

inline size_t ValueBytes(const WeightView& weight) {
  return static_cast<size_t>(weight.count) * weight.block_rows * weight.block_cols *
         SizeOf(weight.dtype);
}

// Where a packed weight has its block_steps.h.
inline size_t StepsOffset(const WeightView& weight) {
  return (ValueBytes(weight) + alignof(int64_t) - 1) / alignof(int64_t) * alignof(int64_t);
}

// Blocks that have them have no more rows than a strip.
struct PackedColumns {
  const uint8_t* at;

  static PackedColumns First(const WeightView& weight, int64_t strip) {
    const auto* const packed = static_cast<const std::byte*>(weight.packed);
    return {StepsOfRow(weight, packed + StepsOffset(weight), strip)};
  }
  void Begin(const BlockStrip&) {}
  PackedColumns Rest() const { return *this; }

  template <int kWidth>
  const float* Next(int64_t block_cols, const float* behind) {
    return behind + NextStep(at) * block_cols * kWidth;
  }
  template <int kWidth>
  static int64_t Left(const float* from, const float* x, int64_t in) {
    return (x + in * kWidth - from) / kWidth;
  }
  template <int kWidth>
  static const float* From(const float* from, const float* /*x*/) {
    return from;
  }
};

}  // namespace espalier::kernels
