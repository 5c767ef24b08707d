// sparse_weight.h — an owned weight W [out, in] in one layout, with exact conversion between all of
// them.
//
// Layouts, index maps and padding: kernels/linear/weight_view.h. "Zero" means ±0.0: a dropped −0.0
// reads back as +0.0, every other value bit for bit (NaN payloads too; a −0.0 inside a stored block
// is stored). Memory: FromDense and Transposed allocate what LayoutBytes says plus one index array.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/sparse/layout_spec.h"
#include "engine/tensor/tensor.h"

namespace espalier::sparse {

// Bytes of values and indices of a weight [out, in] in layout `spec` with `count` as in WeightView
// (dense: out · in, csr: non-zeros, block_csr: stored blocks, diagonal: offsets).
size_t LayoutBytes(const LayoutSpec& spec, DType dtype, int64_t out, int64_t in, int64_t count);

class SparseWeight {
 public:
  SparseWeight() = default;

  // Encodes a dense [out, in] tensor (f32, bf16 or f16; out, in ≥ 1). Every non-zero is kept;
  // blocks and diagonals that hold at least one are stored whole. InvalidArgument for another shape
  // or dtype or block sides outside [1, kMaxBlockSide]; ResourceExhausted when an index would not
  // fit int32 or memory is short.
  static absl::StatusOr<SparseWeight> FromDense(const TensorView& dense, const LayoutSpec& spec);

  // The same, stored element for stored element. ResourceExhausted without memory.
  absl::StatusOr<SparseWeight> Clone() const;

  // The dense [out, in] tensor, same dtype. FailedPrecondition after ReleaseValues.
  absl::StatusOr<Tensor> ToDense() const;

  // Wᵀ [in, out] in the same layout (blocks transposed too): a diagonal stays a diagonal, without
  // going through dense. FailedPrecondition after ReleaseValues.
  absl::StatusOr<SparseWeight> Transposed() const;

  const LayoutSpec& spec() const { return spec_; }
  DType dtype() const { return dtype_; }
  int64_t out() const { return out_; }
  int64_t in() const { return in_; }
  int64_t count() const { return count_; }
  // Bytes held now: values (unless released) and indices.
  size_t bytes() const;
  // Valid while this weight lives and is not changed; a move keeps it valid.
  kernels::WeightView view() const;

  // The values of `view`, for changing stored elements in place.
  void* mutable_values() { return values_.data(); }

  // Frees `values` once a packed form has replaced them (the view's `values` is null from then on).
  void ReleaseValues() { values_ = Buffer(); }
  // The same for the columns.
  void ReleaseColumns();

 private:
  bool released() const { return values_.data() == nullptr && stored_values() > 0; }
  int64_t stored_values() const;
  template <typename Bits>
  absl::Status FindBlocks(const Bits* dense);
  absl::Status TransposeBlockCsr(const SparseWeight& from);
  void TransposeDiagonal(const SparseWeight& from);
  void NarrowColumns();

  DType dtype_ = DType::kFloat32;
  LayoutSpec spec_;
  int64_t out_ = 0, in_ = 0, count_ = 0;
  template <typename T>
  using Indices = std::vector<T, MemoryAllocator<T>>;
  Indices<int32_t> row_ptr_, col_idx_, offsets_;
  Indices<uint16_t> col_idx16_;
  Buffer values_;
};

}  // namespace espalier::sparse
