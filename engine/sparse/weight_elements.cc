#include "engine/sparse/weight_elements.h"

#include "absl/strings/str_cat.h"

namespace espalier::sparse {

absl::Status ValidateWeight(const TensorView& weight) {
  if (weight.shape.size() != 2 || weight.shape[0] < 1 || weight.shape[1] < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a weight must have shape [out, in] with out, in >= 1, got ",
                     espalier::ToString(weight.shape)));
  }
  if (weight.dtype != DType::kFloat32 && weight.dtype != DType::kBFloat16 &&
      weight.dtype != DType::kFloat16) {
    return absl::InvalidArgumentError(
        absl::StrCat("a weight must be FP32, BF16 or FP16, got ", NameOf(weight.dtype)));
  }
  return absl::OkStatus();
}

absl::Status FitsIndex(int64_t count, absl::string_view what) {
  if (count <= std::numeric_limits<int32_t>::max()) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(count, " ", what, " exceed what a 32-bit index can address"));
}

}  // namespace espalier::sparse
