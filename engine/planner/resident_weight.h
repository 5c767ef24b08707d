// resident_weight.h — a weight in one layout and one kernel packing, as it stays in memory while
// serving.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "engine/sparse/sparse_weight.h"
#include "engine/tensor/buffer.h"
#include "engine/tensor/cuda_device.h"
#include "kernels/linear/linear.h"

namespace espalier::planner {

class ResidentWeight {
 public:
  // Encodes `dense` in `spec` and packs it for `variant`; a packed form replaces the plain values. For a GPU (`device`
  // not null) the packed form moves there, and nothing stays in host memory.
  static absl::StatusOr<std::unique_ptr<ResidentWeight>> Create(
      const TensorView& dense, const sparse::LayoutSpec& spec,
      const kernels::LinearVariant& variant, const CudaDevice* device = nullptr);

  // Valid while this object lives.
  kernels::WeightView view() const;
  size_t bytes() const { return weight_.bytes() + packed_.size() + on_device_.bytes(); }

 private:
  sparse::SparseWeight weight_;
  Buffer packed_;
  // On a GPU: the packed form, and a view of it without host arrays (weight_ and packed_ are empty).
  CudaHandle on_device_;
  kernels::WeightView device_view_;
};

}  // namespace espalier::planner
