#include "tests/engine/planner/weight_changes.h"

#include <cstring>

#include "engine/sparse/weight_elements.h"

namespace espalier::testing {

uint32_t BitsAt(const Tensor& tensor, int64_t i) {
  const size_t size = SizeOf(tensor.dtype());
  uint32_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(tensor.data()) + i * size, size);
  return bits;
}

void SetBits(Tensor& tensor, int64_t i, uint32_t bits) {
  const size_t size = SizeOf(tensor.dtype());
  std::memcpy(static_cast<char*>(tensor.data()) + i * size, &bits, size);
}

absl::Status GraphWeights::Read(const std::string& name, Tensor& tensor) const {
  const Tensor& from = graph_.initializers.at(name);
  if (from.dtype() != tensor.dtype() || from.shape() != tensor.shape())
    return absl::InvalidArgumentError("another dtype or shape");
  std::memcpy(tensor.data(), from.data(), from.bytes());
  return absl::OkStatus();
}

Changes::Changes(const formats::ModelGraph& before, const formats::ModelGraph& after) {
  for (const auto& [name, tensor] : before.initializers) {
    const Tensor& other = after.initializers.at(name);
    std::vector<sparse::ElementEdit> elements;
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      if (BitsAt(tensor, i) != BitsAt(other, i))
        elements.push_back({i, BitsAt(tensor, i), BitsAt(other, i)});
    }
    if (elements.empty()) continue;
    elements_.push_back(std::move(elements));
    edits_.push_back({name, elements_.back()});
  }
}

void Apply(Change change, double share, Tensor& tensor, std::mt19937& random) {
  const sparse::FloatBits format = sparse::FloatBitsOf(tensor.dtype());
  std::uniform_real_distribution<double> uniform(0, 1);
  const auto some_value = [&] {
    uint32_t bits = 0;
    const double value = 2 * uniform(random) - 1 + 1e-6;
    ConvertElements(&value, DType::kFloat64, &bits, tensor.dtype(), 1);
    return bits;
  };
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    if (uniform(random) >= share) continue;
    const uint32_t bits = BitsAt(tensor, i);
    const bool zero = (bits & ~format.sign) == 0;
    if (zero != (change == Change::kSign || change == Change::kGrow)) continue;
    const uint32_t sign = random() % 2 == 0 ? 0 : format.sign;
    const uint32_t odd[] = {format.infinity | 3, format.infinity, format.smallest_normal / 2};
    switch (change) {
      case Change::kValue:
      case Change::kGrow:
        SetBits(tensor, i, some_value());
        break;
      case Change::kSign:
        SetBits(tensor, i, bits ^ format.sign);
        break;
      case Change::kDrop:
        SetBits(tensor, i, sign);
        break;
      case Change::kOdd:
        SetBits(tensor, i, odd[random() % 3] | sign);
        break;
    }
  }
}

}  // namespace espalier::testing
