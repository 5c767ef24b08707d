// resident_weight.h — a weight in one layout and one kernel packing, as it stays in memory while
// serving.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "engine/sparse/sparse_weight.h"
#include "engine/tensor/buffer.h"
#include "kernels/linear/linear.h"

namespace espalier::planner {

class ResidentWeight {
 public:
  // Encodes `dense` in `spec` and packs it for `variant`; a packed form replaces the plain values.
  static absl::StatusOr<std::unique_ptr<ResidentWeight>> Create(
      const TensorView& dense, const sparse::LayoutSpec& spec,
      const kernels::LinearVariant& variant);

  // Valid while this object lives.
  kernels::WeightView view() const;
  size_t bytes() const { return weight_.bytes() + packed_.size(); }

 private:
  sparse::SparseWeight weight_;
  Buffer packed_;
};

}  // namespace espalier::planner
