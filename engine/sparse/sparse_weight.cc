#include "engine/sparse/sparse_weight.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/sparse/weight_elements.h"

namespace espalier::sparse {
namespace {

using kernels::DiagonalBlock;
using kernels::WeightView;

bool IsRowCompressed(Layout layout) {
  return layout == Layout::kCsr || layout == Layout::kBlockCsr;
}

// Whether the columns are in col_idx16.
bool HasNarrowColumns(const WeightView& weight) {
  return weight.layout == Layout::kBlockCsr &&
         kernels::FitsColumnIndex16(weight.in, weight.block_cols);
}

template <typename Bits>
bool AnyNonzero(const Bits* values, int64_t n) {
  Bits any = 0;
  for (int64_t i = 0; i < n; ++i) any |= static_cast<Bits>(values[i] << 1);
  return any != 0;
}

// Calls fn(I, J, slot) for every stored block; `slot` is its place in `values`, in blocks. csr is
// block_csr with 1×1 blocks. Diagonals go t by t, not offset by offset: neighbouring t touch the
// same cache lines of a dense matrix, neighbouring offsets do not.
template <typename Fn>
void ForEachBlock(const WeightView& weight, Fn&& fn) {
  const int64_t R = weight.block_row_count(), C = weight.block_col_count();
  if (IsRowCompressed(weight.layout)) {
    for (int64_t I = 0; I < R; ++I) {
      for (int64_t slot = weight.row_ptr[I]; slot < weight.row_ptr[I + 1]; ++slot) {
        fn(I, weight.Column(slot), slot);
      }
    }
    return;
  }
  const int64_t D = weight.diagonal_length();
  for (int64_t t = 0; t < D; ++t) {
    for (int64_t k = 0; k < weight.count; ++k) {
      const auto [I, J] = DiagonalBlock(R, C, weight.offsets[k], t);
      fn(I, J, k * D + t);
    }
  }
}

// Calls fn(stored, cell, n) for every row of every stored block: n elements that lie side by side
// both in `values` (from index `stored`) and in the dense matrix (from index `cell`). Padding is
// left out.
template <typename Fn>
void ForEachRun(const WeightView& weight, Fn&& fn) {
  const int64_t br = weight.block_rows, bc = weight.block_cols;
  if (br == 1 && bc == 1) {
    // A length known at compile time: a single element must not cost a call of memcpy.
    constexpr std::integral_constant<int64_t, 1> kOne;
    ForEachBlock(weight,
                 [&](int64_t I, int64_t J, int64_t slot) { fn(slot, I * weight.in + J, kOne); });
    return;
  }
  ForEachBlock(weight, [&](int64_t I, int64_t J, int64_t slot) {
    const int64_t rows = std::min(br, weight.out - I * br);
    const int64_t cols = std::min(bc, weight.in - J * bc);
    for (int64_t r = 0; r < rows; ++r) {
      fn((slot * br + r) * bc, (I * br + r) * weight.in + J * bc, cols);
    }
  });
}

// to [cols, rows] = from [rows, cols]ᵀ, in tiles that keep the strided side within 32 cache lines.
template <typename Bits>
void TransposeMatrix(const Bits* from, int64_t rows, int64_t cols, Bits* to) {
  constexpr int64_t kTile = 32;
  for (int64_t r0 = 0; r0 < rows; r0 += kTile) {
    const int64_t r1 = std::min(r0 + kTile, rows);
    for (int64_t c0 = 0; c0 < cols; c0 += kTile) {
      const int64_t c1 = std::min(c0 + kTile, cols);
      for (int64_t c = c0; c < c1; ++c) {
        for (int64_t r = r0; r < r1; ++r) to[c * rows + r] = from[r * cols + c];
      }
    }
  }
}

// Values are stored block after block; slot_of(I, J, slot) says where a block goes.
template <typename SlotOf>
void TransposeBlocks(const WeightView& from, void* to, SlotOf&& slot_of) {
  const int64_t br = from.block_rows, bc = from.block_cols;
  WithBitsType(from.dtype, [&](auto tag) {
    using Bits = decltype(tag);
    ForEachBlock(from, [&](int64_t I, int64_t J, int64_t slot) {
      TransposeMatrix(static_cast<const Bits*>(from.values) + slot * br * bc, br, bc,
                      static_cast<Bits*>(to) + slot_of(I, J, slot) * br * bc);
    });
  });
}

absl::Status ReleasedError() {
  return absl::FailedPreconditionError("the values of this weight were released");
}

}  // namespace

size_t LayoutBytes(const LayoutSpec& spec, DType dtype, int64_t out, int64_t in, int64_t count) {
  const WeightView shape = {spec.layout, dtype, out, in, spec.block_rows, spec.block_cols, count};
  const int64_t block = int64_t{spec.block_rows} * spec.block_cols;
  int64_t values = count * block, indices = 0, narrow = 0;  // narrow: indices of 16 bits
  if (IsRowCompressed(spec.layout)) {
    indices = shape.block_row_count() + 1;
    (HasNarrowColumns(shape) ? narrow : indices) += count;
  }
  if (spec.layout == Layout::kDiagonal) {
    values *= shape.diagonal_length();
    indices = count;
  }
  return static_cast<size_t>(values) * SizeOf(dtype) +
         static_cast<size_t>(indices) * sizeof(int32_t) +
         static_cast<size_t>(narrow) * sizeof(uint16_t);
}

// Fills the index arrays and count_ from the dense matrix.
template <typename Bits>
absl::Status SparseWeight::FindBlocks(const Bits* dense) {
  const int64_t br = spec_.block_rows, bc = spec_.block_cols;
  const int64_t R = view().block_row_count(), C = view().block_col_count();
  if (auto status = FitsIndex(std::max(R, C), "block rows or columns"); !status.ok()) return status;
  const bool diagonal = spec_.layout == Layout::kDiagonal;
  std::vector<bool> offset_hit(diagonal ? std::max(R, C) : 0);
  if (!diagonal) row_ptr_.assign(R + 1, 0);
  std::vector<uint8_t> hit(C);
  for (int64_t I = 0; I < R; ++I) {
    std::fill(hit.begin(), hit.end(), 0);
    for (int64_t r = I * br; r < std::min((I + 1) * br, out_); ++r) {
      const Bits* row = dense + r * in_;
      for (int64_t J = 0; J < C; ++J) {
        hit[J] |= AnyNonzero(row + J * bc, std::min(bc, in_ - J * bc));
      }
    }
    for (int64_t J = 0; J < C; ++J) {
      if (!hit[J]) continue;
      if (diagonal) {
        // The inverse of DiagonalBlock; I − J lies in (−C, R).
        const int64_t offset = R >= C ? I - J : J - I;
        offset_hit[offset < 0 ? offset + std::max(R, C) : offset] = true;
      } else {
        col_idx_.push_back(static_cast<int32_t>(J));
      }
    }
    if (diagonal) continue;
    if (auto status = FitsIndex(col_idx_.size(), "stored blocks"); !status.ok()) return status;
    row_ptr_[I + 1] = static_cast<int32_t>(col_idx_.size());
  }
  for (size_t o = 0; o < offset_hit.size(); ++o) {
    if (offset_hit[o]) offsets_.push_back(static_cast<int32_t>(o));
  }
  count_ = static_cast<int64_t>(diagonal ? offsets_.size() : col_idx_.size());
  NarrowColumns();
  col_idx_.shrink_to_fit();
  offsets_.shrink_to_fit();
  return absl::OkStatus();
}

void SparseWeight::NarrowColumns() {
  if (!HasNarrowColumns(view())) return;
  col_idx16_.assign(col_idx_.begin(), col_idx_.end());
  col_idx_ = Indices<int32_t>();  // `= {}` would keep the memory
}

absl::StatusOr<SparseWeight> SparseWeight::FromDense(const TensorView& dense,
                                                     const LayoutSpec& spec) {
  if (auto status = ValidateWeight(dense); !status.ok()) return status;
  for (const int32_t side : {spec.block_rows, spec.block_cols}) {
    if (side < 1 || side > kMaxBlockSide) {
      return absl::InvalidArgumentError(
          absl::StrCat("block side ", side, " is outside [1, ", kMaxBlockSide, "]"));
    }
  }
  SparseWeight weight;
  weight.dtype_ = dense.dtype;
  weight.spec_ = spec;
  weight.out_ = dense.shape[0];
  weight.in_ = dense.shape[1];
  if (spec.layout == Layout::kDense || spec.layout == Layout::kCsr) {
    weight.spec_.block_rows = weight.spec_.block_cols = 1;
  }
  return WithBitsType(dense.dtype, [&](auto tag) -> absl::StatusOr<SparseWeight> {
    using Bits = decltype(tag);
    if (spec.layout == Layout::kDense) {
      weight.count_ = dense.elements();
    } else if (auto status = weight.FindBlocks(dense.As<Bits>()); !status.ok()) {
      return status;
    }
    auto values = Buffer::Allocate(weight.stored_values() * sizeof(Bits));
    if (!values.ok()) return values.status();
    weight.values_ = *std::move(values);
    const Bits* cells = dense.As<Bits>();
    Bits* stored = reinterpret_cast<Bits*>(weight.values_.data());
    if (spec.layout == Layout::kDense) {
      std::copy_n(cells, weight.count_, stored);
      return std::move(weight);
    }
    const bool padded =
        weight.out_ % weight.spec_.block_rows || weight.in_ % weight.spec_.block_cols;
    if (padded) std::fill_n(stored, weight.stored_values(), Bits{0});
    ForEachRun(weight.view(), [&](int64_t to, int64_t from, auto n) {
      std::copy(cells + from, cells + from + n, stored + to);
    });
    return std::move(weight);
  });
}

absl::StatusOr<SparseWeight> SparseWeight::Clone() const {
  auto values = values_.Clone();
  if (!values.ok()) return values.status();
  SparseWeight copy;
  copy.dtype_ = dtype_;
  copy.spec_ = spec_;
  copy.out_ = out_;
  copy.in_ = in_;
  copy.count_ = count_;
  copy.row_ptr_ = row_ptr_;
  copy.col_idx_ = col_idx_;
  copy.offsets_ = offsets_;
  copy.col_idx16_ = col_idx16_;
  copy.values_ = *std::move(values);
  return copy;
}

absl::StatusOr<Tensor> SparseWeight::ToDense() const {
  if (released()) return ReleasedError();
  auto dense = Tensor::Allocate(dtype_, {out_, in_});
  if (!dense.ok()) return dense;
  if (spec_.layout == Layout::kDense) {
    std::memcpy(dense->data(), values_.data(), dense->bytes());
    return dense;
  }
  std::memset(dense->data(), 0, dense->bytes());
  WithBitsType(dtype_, [&](auto tag) {
    using Bits = decltype(tag);
    const Bits* stored = reinterpret_cast<const Bits*>(values_.data());
    Bits* cells = dense->As<Bits>();
    ForEachRun(view(), [&](int64_t from, int64_t to, auto n) {
      std::copy(stored + from, stored + from + n, cells + to);
    });
  });
  return dense;
}

// A counting sort of the blocks by column; rows are visited in order, so they stay ascending.
absl::Status SparseWeight::TransposeBlockCsr(const SparseWeight& from) {
  const int64_t R = view().block_row_count();
  if (auto status = FitsIndex(R, "block rows"); !status.ok()) return status;
  row_ptr_.assign(R + 1, 0);
  for (int64_t i = 0; i < count_; ++i) ++row_ptr_[from.view().Column(i) + 1];
  for (int64_t I = 0; I < R; ++I) row_ptr_[I + 1] += row_ptr_[I];
  col_idx_.resize(count_);
  std::vector<int32_t> next(row_ptr_.begin(), row_ptr_.end() - 1);
  TransposeBlocks(from.view(), values_.data(), [&](int64_t I, int64_t J, int64_t) {
    const int32_t slot = next[J]++;
    col_idx_[slot] = static_cast<int32_t>(I);
    return int64_t{slot};
  });
  NarrowColumns();
  return absl::OkStatus();
}

// Let block-diagonal o of W hold (row, col) at t. In Wᵀ that block is (col, row), and
//   R > C:      row = (t + o) mod R, col = t. Wᵀ is wide: its row is t, its column (t + o) mod R:
//               same o, same t.
//   R < C:      the mirror image: same o, same t.
//   R = C = n:  both matrices count as tall, so the column is t: t' = row = (t + o) mod n, and
//               o' = (col − row) mod n = −o mod n: offsets mirrored, each diagonal rotated by o.
void SparseWeight::TransposeDiagonal(const SparseWeight& from) {
  const int64_t n = from.view().block_row_count();
  offsets_ = from.offsets_;
  if (n != from.view().block_col_count()) {
    TransposeBlocks(from.view(), values_.data(),
                    [](int64_t, int64_t, int64_t slot) { return slot; });
    return;
  }
  // Mirrored and ascending: 0 stays first, the others turn around.
  const auto first = offsets_.begin() + (!offsets_.empty() && offsets_[0] == 0);
  std::reverse(first, offsets_.end());
  for (auto it = first; it != offsets_.end(); ++it) *it = static_cast<int32_t>(n - *it);
  const int64_t last = count_ - 1 + (first - offsets_.begin());
  TransposeBlocks(from.view(), values_.data(), [&](int64_t I, int64_t, int64_t slot) {
    const int64_t k = slot / n;
    return (k < first - offsets_.begin() ? k : last - k) * n + I;
  });
}

absl::StatusOr<SparseWeight> SparseWeight::Transposed() const {
  if (released()) return ReleasedError();
  SparseWeight result;
  result.dtype_ = dtype_;
  result.spec_ = {spec_.layout, spec_.block_cols, spec_.block_rows};
  result.out_ = in_;
  result.in_ = out_;
  result.count_ = count_;
  auto values = Buffer::Allocate(values_.size());
  if (!values.ok()) return values.status();
  result.values_ = *std::move(values);
  switch (spec_.layout) {
    case Layout::kDense:
      WithBitsType(dtype_, [&](auto tag) {
        using Bits = decltype(tag);
        TransposeMatrix(reinterpret_cast<const Bits*>(values_.data()), out_, in_,
                        reinterpret_cast<Bits*>(result.values_.data()));
      });
      break;
    case Layout::kCsr:
    case Layout::kBlockCsr:
      if (auto status = result.TransposeBlockCsr(*this); !status.ok()) return status;
      break;
    case Layout::kDiagonal:
      result.TransposeDiagonal(*this);
      break;
  }
  return result;
}

void SparseWeight::ReleaseColumns() {
  col_idx_ = Indices<int32_t>();
  col_idx16_ = Indices<uint16_t>();
}

int64_t SparseWeight::stored_values() const {
  const int64_t per_count = spec_.layout == Layout::kDiagonal ? view().diagonal_length() : 1;
  return count_ * per_count * spec_.block_rows * spec_.block_cols;
}

size_t SparseWeight::bytes() const {
  return values_.size() + (row_ptr_.size() + col_idx_.size() + offsets_.size()) * sizeof(int32_t) +
         col_idx16_.size() * sizeof(uint16_t);
}

kernels::WeightView SparseWeight::view() const {
  const auto data_or_null = [](const auto& v) { return v.empty() ? nullptr : v.data(); };
  WeightView view = {spec_.layout, dtype_, out_, in_, spec_.block_rows, spec_.block_cols, count_};
  view.row_ptr = data_or_null(row_ptr_);
  view.col_idx = data_or_null(col_idx_);
  view.col_idx16 = data_or_null(col_idx16_);
  view.offsets = data_or_null(offsets_);
  view.values = values_.data();
  return view;
}

}  // namespace espalier::sparse
