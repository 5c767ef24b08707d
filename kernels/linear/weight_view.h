// weight_view.h — a borrowed weight W [out, in] in one of the layouts that kernels read.
//
//   Layout      arrays                                              meaning
//   kDense      values [out, in]                                    row-major
//   kCsr        row_ptr [out+1], col_idx [nnz], values [nnz]        columns ascending within a row
//   kBlockCsr   row_ptr [R+1], col_idx16 or col_idx [B],            block (I, J) covers rows I·br.., columns J·bc..
//               values [B, br, bc]
//   kDiagonal   offsets [K], values [K, D, br, bc]                  block-diagonal o holds block (row(o,t), col(o,t))
//
//   R = ceil(out / br), C = ceil(in / bc), D = min(R, C), t in [0, D):
//   R >= C: row = (t + o) mod R, col = t            R < C: row = t, col = (t + o) mod C
//   With br = bc = 1 that is DynaDiag's cyclic diagonal: D values per offset and no index per value.
//
// A block is stored row-major. An edge block that sticks out of W is padded with zeros; kernels may read the padding of
// `values`, never x or y beyond [0, in) and [0, out).
// Block columns that fit 16 bits (C <= 65,536) are kept in col_idx16, and col_idx is null: an index of 32 bits adds 6 % to
// a block of 4 x 4 f32 values, one of 16 bits 3 %.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"

namespace espalier::kernels {

// One line per layout: enumerator, printed name.
#define ESPALIER_LAYOUTS(X) \
  X(kDense, "dense")        \
  X(kCsr, "csr")            \
  X(kBlockCsr, "block_csr") \
  X(kDiagonal, "diagonal")

enum class Layout : uint8_t {
#define ESPALIER_LAYOUT_ENUM(name, text) name,
  ESPALIER_LAYOUTS(ESPALIER_LAYOUT_ENUM)
#undef ESPALIER_LAYOUT_ENUM
};

constexpr const char* NameOf(Layout layout) {
  constexpr const char* kNames[] = {
#define ESPALIER_LAYOUT_NAME(name, text) text,
      ESPALIER_LAYOUTS(ESPALIER_LAYOUT_NAME)
#undef ESPALIER_LAYOUT_NAME
  };
  return kNames[static_cast<uint8_t>(layout)];
}

struct WeightView {
  Layout layout = Layout::kDense;
  DType dtype = DType::kFloat32;  // of values: kFloat32, kBFloat16 or kFloat16
  int64_t out = 0;
  int64_t in = 0;
  int32_t block_rows = 1;  // br
  int32_t block_cols = 1;  // bc
  int64_t count = 0;  // dense: out·in, csr: nnz, block_csr: stored blocks B, diagonal: offsets K

  const int32_t* row_ptr = nullptr;
  const int32_t* col_idx = nullptr;
  const uint16_t* col_idx16 = nullptr;
  const int32_t* offsets = nullptr;  // ascending, distinct, in [0, max(R, C))
  const void* values = nullptr;      // null when the variant reads `packed` instead
  const void* packed =
      nullptr;  // a variant's own form of the values (LinearVariant::packed_bytes > 0)

  // The block column of stored block i (csr: the column of value i). For loops that run once per weight, not per token.
  int64_t Column(int64_t i) const { return col_idx16 != nullptr ? col_idx16[i] : col_idx[i]; }
  int64_t block_row_count() const { return (out + block_rows - 1) / block_rows; }  // R
  int64_t block_col_count() const { return (in + block_cols - 1) / block_cols; }   // C
  int64_t diagonal_length() const {                                                // D
    return block_row_count() < block_col_count() ? block_row_count() : block_col_count();
  }
};

// Whether the block columns of a weight with `in` columns fit 16 bits.
constexpr bool FitsColumnIndex16(int64_t in, int64_t block_cols) {
  return (in + block_cols - 1) / block_cols <= 1 << 16;
}

// Block coordinates of position t on block-diagonal `offset`; R, C as above.
struct BlockPosition {
  int64_t row;
  int64_t col;
};
constexpr BlockPosition DiagonalBlock(int64_t R, int64_t C, int64_t offset, int64_t t) {
  if (R >= C) return {(t + offset) % R, t};
  return {t, (t + offset) % C};
}

}  // namespace espalier::kernels
