#include "engine/planner/resident_weight.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace espalier::planner {

absl::StatusOr<std::unique_ptr<ResidentWeight>> ResidentWeight::Create(
    const TensorView& dense, const sparse::LayoutSpec& spec, const kernels::LinearVariant& variant,
    const CudaDevice* device) {
  auto resident = std::make_unique<ResidentWeight>();
  auto weight = sparse::SparseWeight::FromDense(dense, spec);
  if (!weight.ok()) return weight.status();
  resident->weight_ = *std::move(weight);
  if (variant.packing == nullptr) return resident;
  const kernels::WeightView view = resident->weight_.view();
  auto packed = Buffer::Allocate(variant.packed_bytes(view));
  if (!packed.ok()) return packed.status();
  resident->packed_ = *std::move(packed);
  const kernels::KernelStatus status = variant.pack(view, resident->packed_.data());
  if (!status.ok()) {
    return absl::InternalError(absl::StrCat(variant.name, " cannot pack a weight of layout ",
                                            sparse::ToString(spec), " [", view.out, ", ", view.in,
                                            "]: ", status.message));
  }
  if (device != nullptr) {
    auto uploaded = device->Upload(resident->packed_.data(), resident->packed_.size());
    if (!uploaded.ok()) return uploaded.status();
    resident->on_device_ = *std::move(uploaded);
    resident->device_view_ = view;
    resident->device_view_.row_ptr = resident->device_view_.col_idx = nullptr;
    resident->device_view_.offsets = nullptr;
    resident->device_view_.values = nullptr;
    resident->device_view_.packed = resident->on_device_.get();
    resident->packed_ = Buffer();
    resident->weight_ = sparse::SparseWeight();
    return resident;
  }
  resident->weight_.ReleaseValues();
  return resident;
}

kernels::WeightView ResidentWeight::view() const {
  if (on_device_.get() != nullptr) return device_view_;
  kernels::WeightView view = weight_.view();
  view.packed = packed_.data();
  return view;
}

}  // namespace espalier::planner
