#include "engine/planner/resident_weight.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/sparse/weight_elements.h"
#include "kernels/block_csr_linear/block_csr_linear.h"

namespace espalier::planner {

using sparse::ElementEdit;

absl::StatusOr<std::unique_ptr<ResidentWeight>> ResidentWeight::Create(
    const TensorView& dense, const sparse::LayoutSpec& spec, const kernels::LinearVariant& variant,
    const CudaDevice* device) {
  std::unique_ptr<ResidentWeight> resident(new ResidentWeight(spec, variant, device));
  if (absl::Status status = resident->Rebuild(dense); !status.ok()) return status;
  return resident;
}

absl::StatusOr<std::unique_ptr<ResidentWeight>> ResidentWeight::Clone() const {
  std::unique_ptr<ResidentWeight> clone(new ResidentWeight(spec_, variant_, device_));
  auto weight = weight_.Clone();
  if (!weight.ok()) return weight.status();
  clone->weight_ = *std::move(weight);
  auto packed = packed_.Clone();
  if (!packed.ok()) return packed.status();
  clone->packed_ = *std::move(packed);
  if (device_ == nullptr) return clone;
  auto on_device = device_->CopyOf(on_device_);
  if (!on_device.ok()) return on_device.status();
  clone->on_device_ = *std::move(on_device);
  return clone;
}

absl::Status ResidentWeight::Rebuild(const TensorView& dense) {
  // What was there makes room first.
  on_device_ = CudaHandle();
  packed_ = Buffer();
  weight_ = sparse::SparseWeight();
  auto weight = sparse::SparseWeight::FromDense(dense, spec_);
  if (!weight.ok()) return weight.status();
  weight_ = *std::move(weight);
  if (variant_.packing == nullptr) return absl::OkStatus();
  const kernels::WeightView view = weight_.view();
  auto packed = Buffer::Allocate(variant_.packed_bytes(view));
  if (!packed.ok()) return packed.status();
  packed_ = *std::move(packed);
  const kernels::KernelStatus status = variant_.pack(view, packed_.data());
  if (!status.ok()) {
    return absl::InternalError(absl::StrCat(variant_.name, " cannot pack a weight of layout ",
                                            sparse::ToString(spec_), " [", view.out, ", ", view.in,
                                            "]: ", status.message));
  }
  weight_.ReleaseValues();
  if (device_ == nullptr) {
    if (kernels::BlockCsrLinearCpu::PacksColumns(view)) weight_.ReleaseColumns();
    return absl::OkStatus();
  }
  auto uploaded = device_->Upload(packed_.data(), packed_.size());
  if (!uploaded.ok()) return uploaded.status();
  on_device_ = *std::move(uploaded);
  packed_ = Buffer();
  return absl::OkStatus();
}

kernels::WeightView ResidentWeight::view() const {
  kernels::WeightView view = weight_.view();
  if (device_ == nullptr) {
    view.packed = packed_.data();
    return view;
  }
  // The indices are the host's.
  view.row_ptr = view.col_idx = view.offsets = nullptr;
  view.col_idx16 = nullptr;
  view.packed = on_device_.get();
  return view;
}

absl::StatusOr<bool> ResidentWeight::EditInPlace(absl::Span<const ElementEdit> edits, Zeros zeros,
                                                 MemoryPatcher& patcher) {
  if (variant_.locate == nullptr) return false;
  std::vector<int64_t> elements(edits.size()), offsets(edits.size());
  for (size_t i = 0; i < edits.size(); ++i) elements[i] = edits[i].position;
  // A GPU's packed form is not to be read here, and its columns are the host's.
  const kernels::WeightView view = device_ == nullptr ? this->view() : weight_.view();
  const kernels::KernelStatus status = variant_.locate(view, elements, offsets.data());
  if (!status.ok()) return absl::ResourceExhaustedError(status.message);
  const uint32_t magnitude = ~sparse::FloatBitsOf(view.dtype).sign;
  bool fits = true;
  for (size_t i = 0; i < edits.size(); ++i) {
    const bool was = (edits[i].old_bits & magnitude) != 0,
               is = (edits[i].new_bits & magnitude) != 0;
    if (was != is && zeros == Zeros::kAsEncoded) fits = false;
    if (offsets[i] >= 0) continue;
    if (was) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "row %d, column %d is zero, expected bits %#x", edits[i].position / view.in,
          edits[i].position % view.in, edits[i].old_bits));
    }
    if (is) fits = false;
  }
  if (absl::Status patched = Patch(edits, offsets, fits, patcher); !patched.ok()) return patched;
  return fits;
}

absl::Status ResidentWeight::Patch(absl::Span<const ElementEdit> edits,
                                   absl::Span<const int64_t> offsets, bool write,
                                   MemoryPatcher& patcher) {
  const kernels::WeightView view = weight_.view();
  std::vector<kernels::ElementPatch> patches;
  for (size_t i = 0; i < edits.size(); ++i) {
    if (offsets[i] < 0) continue;
    patches.push_back(
        {offsets[i], edits[i].old_bits, write ? edits[i].new_bits : edits[i].old_bits});
  }
  void* memory = device_ != nullptr            ? on_device_.get()
                 : variant_.packing != nullptr ? packed_.data()
                                               : weight_.mutable_values();
  auto unexpected = patcher.Patch(memory, static_cast<int32_t>(SizeOf(view.dtype)), patches);
  if (!unexpected.ok() || *unexpected < 0) return unexpected.status();
  size_t i = 0;  // of the edit: patches are those of stored elements
  for (int64_t before = *unexpected; offsets[i] < 0 || before-- > 0; ++i) {
  }
  const ElementEdit& edit = edits[i];
  return absl::FailedPreconditionError(absl::StrFormat("row %d, column %d does not hold bits %#x",
                                                       edit.position / view.in,
                                                       edit.position % view.in, edit.old_bits));
}

}  // namespace espalier::planner
