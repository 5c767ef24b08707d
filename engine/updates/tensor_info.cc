#include "engine/updates/tensor_info.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/formats/names.h"

namespace espalier::updates {

int64_t TensorInfo::row_elements() const {
  if (dims.size() < 2 || dims[0] == 0) return kind() == ElementKind::kByte ? bytes : 1;
  return elements() / dims[0];
}

std::string TensorInfo::ToString() const {
  return absl::StrCat(formats::Shown(name), " ", formats::Shown(dtype), " [",
                      absl::StrJoin(dims, ", "), "]");
}

int64_t FindTensor(const std::vector<TensorInfo>& tensors, absl::string_view name) {
  const auto found = std::lower_bound(
      tensors.begin(), tensors.end(), name,
      [](const TensorInfo& tensor, absl::string_view key) { return tensor.name < key; });
  return found != tensors.end() && found->name == name ? found - tensors.begin() : -1;
}

absl::Status TensorReader::ReadWindows(size_t tensor, int64_t first, int64_t count,
                                       Visit visit) const {
  std::vector<char> window(
      static_cast<size_t>(std::min(count, kWindowElements) * SizeOf(tensors()[tensor].kind())));
  for (int64_t at = first; at < first + count; at += kWindowElements) {
    const int64_t here = std::min(kWindowElements, first + count - at);
    if (auto status = Read(tensor, at, here, window.data()); !status.ok()) return status;
    visit(at, window.data(), here);
  }
  return absl::OkStatus();
}

}  // namespace espalier::updates
