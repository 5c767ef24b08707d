#include "clients/cli/elements.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "clients/cli/table.h"
#include "engine/tensor/tensor.h"

namespace espalier::cli {
namespace {

// Calls visit(value) for elements [first, first + count): bool, an integer, float, double or
// std::string.
template <typename T, typename Visit>
void VisitAs(const client::Tensor& tensor, int64_t first, int64_t count, const Visit& visit) {
  for (int64_t i = first; i < first + count; ++i) {
    T value;
    std::memcpy(&value, tensor.bytes.data() + i * sizeof(T), sizeof(T));
    visit(value);
  }
}

template <typename Visit>
void VisitElements(const client::Tensor& tensor, int64_t first, int64_t count, const Visit& visit) {
  const std::string& type = tensor.datatype;
  if (type == "BOOL") return VisitAs<bool>(tensor, first, count, visit);
  if (type == "UINT8") return VisitAs<uint8_t>(tensor, first, count, visit);
  if (type == "UINT16") return VisitAs<uint16_t>(tensor, first, count, visit);
  if (type == "UINT32") return VisitAs<uint32_t>(tensor, first, count, visit);
  if (type == "UINT64") return VisitAs<uint64_t>(tensor, first, count, visit);
  if (type == "INT8") return VisitAs<int8_t>(tensor, first, count, visit);
  if (type == "INT16") return VisitAs<int16_t>(tensor, first, count, visit);
  if (type == "INT32") return VisitAs<int32_t>(tensor, first, count, visit);
  if (type == "INT64") return VisitAs<int64_t>(tensor, first, count, visit);
  if (type == "FP32") return VisitAs<float>(tensor, first, count, visit);
  if (type == "FP64") return VisitAs<double>(tensor, first, count, visit);
  if (type == "FP16") {
    return VisitAs<uint16_t>(tensor, first, count,
                             [&](uint16_t bits) { visit(Float16ToFloat(bits)); });
  }
  if (type == "BF16") {
    return VisitAs<uint16_t>(tensor, first, count,
                             [&](uint16_t bits) { visit(BFloat16ToFloat(bits)); });
  }
  const std::vector<std::string> values = client::BytesValues(tensor).value();
  std::for_each(values.begin() + first, values.begin() + first + count, visit);
}

std::string Text(const std::string& value) {
  return absl::StrCat("\"", absl::CHexEscape(value), "\"");
}
std::string Text(bool value) { return value ? "true" : "false"; }
template <typename T>
std::string Text(T value) {
  if constexpr (std::is_floating_point_v<T>) return FormatNumber(value);
  return absl::StrCat(
      static_cast<std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>(value));
}

struct JsonElement {
  JsonWriter& json;
  void operator()(const std::string& value) const { json.String(value); }
  void operator()(bool value) const { json.Bool(value); }
  template <typename T>
  void operator()(T value) const {
    if constexpr (std::is_floating_point_v<T>) {
      json.Number(value);
    } else if constexpr (std::is_signed_v<T>) {
      json.Int(value);
    } else {
      json.Uint(value);
    }
  }
};

int64_t CountOf(const client::Tensor& tensor) {
  return client::ElementCount(tensor.shape).value_or(0);
}

}  // namespace

absl::StatusOr<std::vector<double>> Numbers(const client::Tensor& tensor) {
  if (tensor.datatype == "BYTES") {
    return absl::InvalidArgumentError(
        absl::StrCat("output '", tensor.name, "' is BYTES, expected numbers"));
  }
  std::vector<double> numbers;
  numbers.reserve(CountOf(tensor));
  VisitElements(tensor, 0, CountOf(tensor), [&](const auto& value) {
    if constexpr (!std::is_same_v<std::decay_t<decltype(value)>, std::string>) {
      numbers.push_back(static_cast<double>(value));
    }
  });
  return numbers;
}

std::vector<std::string> Texts(const client::Tensor& tensor, int64_t first, int64_t count) {
  std::vector<std::string> texts;
  VisitElements(tensor, first, count, [&](const auto& value) { texts.push_back(Text(value)); });
  return texts;
}

void WriteElements(const client::Tensor& tensor, JsonWriter& json) {
  VisitElements(tensor, 0, CountOf(tensor), JsonElement{json});
}

Items Items::Of(const client::Tensor& tensor) {
  const int64_t count = tensor.shape.empty() ? 1 : tensor.shape.front();
  return {count, count == 0 ? 0 : CountOf(tensor) / count};
}

std::vector<int64_t> TopIndices(const double* values, int64_t size, int64_t k) {
  std::vector<int64_t> indices(size);
  std::iota(indices.begin(), indices.end(), 0);
  k = std::min(k, size);
  const auto key = [&](int64_t i) { return std::isnan(values[i]) ? -INFINITY : values[i]; };
  std::partial_sort(indices.begin(), indices.begin() + k, indices.end(), [&](int64_t a, int64_t b) {
    if (std::isnan(values[a]) != std::isnan(values[b])) return std::isnan(values[b]);
    return key(a) != key(b) ? key(a) > key(b) : a < b;
  });
  indices.resize(k);
  return indices;
}

}  // namespace espalier::cli
