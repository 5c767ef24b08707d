// resident_weight.h — a weight in one layout and one kernel packing, as it stays in memory while
// serving.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/planner/patch_memory.h"
#include "engine/sparse/element_edit.h"
#include "engine/sparse/sparse_weight.h"
#include "engine/tensor/buffer.h"
#include "engine/tensor/cuda_device.h"
#include "kernels/linear/linear.h"

namespace espalier::planner {

class ResidentWeight {
 public:
  // Encodes `dense` in `spec` and packs it for `variant`; a packed form replaces the plain values, and the columns if it
  // has them. For a GPU (`device` not null) it moves there; only the layout's indices stay in host memory.
  static absl::StatusOr<std::unique_ptr<ResidentWeight>> Create(
      const TensorView& dense, const sparse::LayoutSpec& spec,
      const kernels::LinearVariant& variant, const CudaDevice* device = nullptr);

  // Another one with the same bytes, on the same device, which nothing writes meanwhile. ResourceExhausted without memory.
  absl::StatusOr<std::unique_ptr<ResidentWeight>> Clone() const;

  // Valid while this object lives, and until Rebuild.
  kernels::WeightView view() const;
  const sparse::LayoutSpec& spec() const { return spec_; }
  // On its device.
  size_t bytes() const {
    return device_ != nullptr ? on_device_.bytes() : weight_.bytes() + packed_.size();
  }

  // What an edit may leave behind: the very bytes of an encoding of the new weight, or also zeros that are
  // stored where one would not store them.
  enum class Zeros { kAsEncoded, kMayStay };
  // Changes elements in place. `edits`: positions row · in + col, ascending; bits of this weight's type. False, and
  // nothing is changed, when a non-zero has no place in the layout, when a zero would stay that may not, or when the
  // packing has no places. FailedPrecondition when an element is not what its edit says: that holds for either answer.
  // `patcher` is for this weight's device.
  absl::StatusOr<bool> EditInPlace(absl::Span<const sparse::ElementEdit> edits, Zeros zeros,
                                   MemoryPatcher& patcher);
  // Encodes and packs another weight of the same shape and type in its place. ResourceExhausted without memory: the
  // weight is not to be used then.
  absl::Status Rebuild(const TensorView& dense);

 private:
  ResidentWeight(const sparse::LayoutSpec& spec, const kernels::LinearVariant& variant,
                 const CudaDevice* device)
      : spec_(spec), variant_(variant), device_(device) {}

  absl::Status Patch(absl::Span<const sparse::ElementEdit> edits, absl::Span<const int64_t> offsets,
                     bool write, MemoryPatcher& patcher);

  sparse::LayoutSpec spec_;
  kernels::LinearVariant variant_;
  const CudaDevice* device_;
  sparse::SparseWeight weight_;
  Buffer packed_;
  CudaHandle on_device_;  // on a GPU: the packed form
};

}  // namespace espalier::planner
