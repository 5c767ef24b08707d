// two_four_image.h — scattered weights, diagonal(1) and csr, as 2:4 sparse operands where they are, dense ones where not.
//
// Sparse tensor cores take at most two non-zeros of every four neighbouring columns of a row. At 90 % sparsity only 0.4 %
// of these groups hold more, and those of diagonals lie together, where three offsets fall into four. So W is cut into
// PIECES of 64 rows × 32 columns, each of a kind of its own:
//
//   none    no value: neither stored nor multiplied
//   sparse  at most two values in every group: 2,304 bytes
//   dense   the rest: 4,096 bytes
//
// Exact, whatever the weight, without permutations and remainders. A dense piece takes the tensor cores twice as long as a
// sparse one, but both read the same x from shared memory, which is what bounds the kernel (two_four_linear.cu).
// Random diagonals of 4,096² and 10,240²: 19 % of the pieces are dense at 90 %, 2–5 % at 95 %; csr: 86 % and 25 %.
//
// A HALF is 128 rows, for one thread block; a GROUP is two halves, for a cluster. A PANEL is 64 columns of a group that hold
// a value.
//
//   section   type             order
//   groups    int32 [G + 1]      panels of group g: [groups[g], groups[g + 1])
//   panels    TwoFourPanel[P][2] by group, then by column, a half each; room for every panel
//   pieces    bytes              panel by panel, 64 rows by 64 rows: their dense pieces, then their sparse ones
//
// Dense piece: values [64][32], rows of 64 bytes, SWIZZLED as in block_image.h.
// Sparse piece: values [64][16], two a group in the order of their columns, rows of 32 bytes, swizzled; then uint32 [64]:
// word 16w + 2q + p has rows 16w + q (low half) and 16w + q + 8 (high half), columns 16p .. 16p + 15, group i in bits
// 4i .. 4i + 3: the column of the first value (low two bits) and of the second. Missing values are zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/kernel_status.h"
#include "kernels/linear/linear.h"

namespace espalier::kernels::cuda {

constexpr int kTwoFourRows = 64, kTwoFourColumns = 32;  // of a piece
constexpr int kTwoFourPanelColumns = 2 * kTwoFourColumns;
constexpr int kTwoFourGroupRows = 4 * kTwoFourRows;
constexpr int kDensePieceBytes = kTwoFourRows * kTwoFourColumns * 2;
constexpr int kSparseValuesBytes = kDensePieceBytes / 2;
constexpr int kSparsePieceBytes = kSparseValuesBytes + kTwoFourRows * 4;
constexpr int kPieceUnit = 256;  // bytes; what both sizes are multiples of

struct TwoFourPanel {
  int32_t column;
  uint32_t begin;  // of the half's pieces, in units
  uint32_t
      sizes;  // in units, of its first 64 rows' pieces (low 16 bits) and of its second ones', which follow
  // A byte a piece, the first in the lowest: where it lies among those of its rows, in units (6 bits), and kSparsePiece or
  // kDensePiece; 0: none. Piece 2·i + j is rows 64·i, columns 32·j.
  uint32_t pieces;
};
constexpr uint32_t kPieceOffsetMask = 0x3f, kSparsePiece = 0x40, kDensePiece = 0x80;
// Two bytes of `pieces`: both are sparse.
constexpr uint32_t kSparsePair = kSparsePiece | (kSparsePiece | kSparsePieceBytes / kPieceUnit)
                                                    << 8;

struct TwoFourImage {
  int64_t groups = 0, panel_columns = 0;        // G, and ⌈in/64⌉
  size_t panels_offset = 0, pieces_offset = 0;  // groups are at 0
};

TwoFourImage TwoFourImageOf(const WeightView& weight);

// Layout csr, or diagonal with 1×1 blocks; 2-byte values and x; W of at most 2^31 elements (an image is never larger than
// the dense weight and its panels).
bool FitsTwoFourImage(const LinearDesc& desc);

size_t TwoFourImageBytes(const WeightView& weight);
KernelStatus PackTwoFourImage(const WeightView& weight, void* packed);
KernelStatus LocateInTwoFourImage(const WeightView& weight, std::span<const int64_t> elements,
                                  int64_t* offsets);

}  // namespace espalier::kernels::cuda
