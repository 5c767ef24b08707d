// sparse_weight.h — an owned weight W [out, in] in one layout, with exact conversion between all of them.
//
// Layouts, index maps and padding: kernels/linear/weight_view.h. "Zero" means ±0.0: a dropped −0.0 reads back as +0.0,
// every other value bit for bit (NaN payloads too). Conversions cap what they allocate by what the view's counts imply.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "engine/sparse/layout_spec.h"
#include "engine/tensor/tensor.h"

namespace espalier::sparse {

class SparseWeight {
 public:
  SparseWeight() = default;

  // Encodes a dense [out, in] tensor (f32, bf16 or f16). Every non-zero is kept; blocks and diagonals that hold at least
  // one are stored whole. InvalidArgument for rank ≠ 2, another dtype, or block sides outside [1, 4096];
  // ResourceExhausted when an index would not fit int32.
  static absl::StatusOr<SparseWeight> FromDense(const TensorView& dense, const LayoutSpec& spec);

  // The dense [out, in] tensor, same dtype.
  absl::StatusOr<Tensor> ToDense() const;

  // Wᵀ [in, out] in the same layout (blocks transposed too): a diagonal stays a diagonal, without going through dense.
  absl::StatusOr<SparseWeight> Transposed() const;

  LayoutSpec spec() const;
  int64_t out() const { return out_; }
  int64_t in() const { return in_; }
  int64_t count() const { return count_; }
  // Bytes held: values and indices.
  size_t bytes() const;
  kernels::WeightView view() const;

  // Frees `values` once a packed form has replaced them (the view's `values` is null from then on).
  void ReleaseValues() { values_ = Buffer(); }

 private:
  DType dtype_ = DType::kFloat32;
  LayoutSpec spec_;
  int64_t out_ = 0, in_ = 0, count_ = 0;
  std::vector<int32_t> row_ptr_, col_idx_, offsets_;
  Buffer values_;
};

}  // namespace espalier::sparse
