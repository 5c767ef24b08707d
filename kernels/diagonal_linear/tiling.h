// tiling.h — how the rows of a weight with cyclic diagonals are cut into tiles, and which part of a
// diagonal a tile meets. Shared by packing and by the kernels of every instruction set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/linear/linear.h"

namespace espalier::kernels {

// 96 rows: six AVX-512 vectors (twelve AVX2) with one token, four tiles of 24 rows with 16 tokens,
// and short enough that the values of a tile (96 · K) stay in L2 while panel after panel of tokens
// goes through.
inline constexpr int64_t kDiagonalTileRows = 96;

// Columns kept on both sides of x: a tile may start up to 95 columns before the first and end, with
// a vector's worth of rows that are computed but not stored, 111 after the last.
inline constexpr int64_t kDiagonalPad = 112;

constexpr int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

constexpr int64_t DiagonalExtendedCols(int64_t in) { return RoundUp(in, 16) + 2 * kDiagonalPad; }

// Rows [first, first + rows) of a tile lie on the diagonal; row i of the tile meets column (col +
// i) mod in. `col` counts from the tile's row 0, so it may be negative when first > 0.
struct DiagonalPiece {
  int64_t first;
  int64_t rows;
  int64_t col;
};

class DiagonalTiling {
 public:
  DiagonalTiling(int64_t out, int64_t in) : out_(out), in_(in) {}

  // More rows than columns: a diagonal meets only part of the rows.
  bool tall() const { return out_ > in_; }
  bool square() const { return out_ == in_; }
  int64_t tiles() const { return (out_ + kDiagonalTileRows - 1) / kDiagonalTileRows; }
  int64_t TileRows(int64_t tile) const {
    return std::min(kDiagonalTileRows, out_ - tile * kDiagonalTileRows);
  }
  // Where each tile's values start, when that needs a table.
  size_t table_bytes() const { return tall() ? RoundUp(tiles() * 8, 64) : 0; }

  const void* TileValues(const WeightView& weight, int64_t tile, size_t value_size) const {
    const auto* table = static_cast<const int64_t*>(weight.packed);
    const int64_t start = tall() ? table[tile] : tile * kDiagonalTileRows * weight.count;
    return static_cast<const std::byte*>(weight.packed) + table_bytes() + start * value_size;
  }

  // The position t on its diagonal of the value at (row, col mod in).
  int64_t Position(int64_t row, int64_t col) const { return out_ >= in_ ? col % in_ : row; }

  // The part of a diagonal within rows [row, row + rows), none when its `rows` <= 0. Where !tall()
  // piece 0 is the whole tile and there is no piece 1; else a tile may meet both ends of a diagonal.
  DiagonalPiece Piece(int64_t offset, int64_t row, int64_t rows, int wrap) const {
    int64_t col = out_ >= in_ ? row - offset : row + offset;
    if (!tall()) {
      if (col < 0) col += in_;
      if (col >= in_) col -= in_;
      return {0, wrap == 0 ? rows : 0, col};
    }
    col += wrap * out_;
    const int64_t first = std::max<int64_t>(0, -col);
    return {first, std::min(rows, in_ - col) - first, col};
  }

 private:
  int64_t out_;
  int64_t in_;
};

// Values of a piece that covers part of a tile, with zeros for the rest and what loads run into.
inline constexpr int64_t kDiagonalFilledRows = kDiagonalTileRows + 16;

// The parts of a run's scratch: x with its surroundings, then what each task needs for one tile.
struct DiagonalScratch {
  DiagonalScratch(const LinearDesc& desc, int threads) : tasks(std::max(1, threads)) {
    const bool tall = desc.out > desc.in;
    const int64_t pieces = (tall ? 2 : 1) * desc.count;
    extended_bytes = RoundUp(RoundUp(desc.tokens, 16) * DiagonalExtendedCols(desc.in) * 4, 64);
    cols_bytes = RoundUp(pieces * 4, 64);
    pointers_bytes = tall ? RoundUp(pieces * 8, 64) : 0;
    const int64_t value_bytes = static_cast<int64_t>(SizeOf(desc.weight_dtype));
    filled_bytes = tall ? RoundUp(pieces * kDiagonalFilledRows * value_bytes, 64) : 0;
    task_bytes = cols_bytes + pointers_bytes + filled_bytes;
  }
  size_t total_bytes() const { return extended_bytes + tasks * task_bytes; }

  int64_t tasks;
  int64_t extended_bytes, cols_bytes, pointers_bytes, filled_bytes, task_bytes;
};

template <typename W>
struct DiagonalTaskScratch {
  DiagonalTaskScratch(const DiagonalScratch& sizes, void* scratch, int64_t task) {
    std::byte* at =
        static_cast<std::byte*>(scratch) + sizes.extended_bytes + task * sizes.task_bytes;
    cols = reinterpret_cast<int32_t*>(at);
    pointers = reinterpret_cast<const W**>(at + sizes.cols_bytes);
    filled = reinterpret_cast<W*>(at + sizes.cols_bytes + sizes.pointers_bytes);
  }
  int32_t* cols;
  const W** pointers;
  W* filled;
};

}  // namespace espalier::kernels
