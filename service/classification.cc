#include "service/classification.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace espalier::service {
namespace {

// Half-precision numbers, as bits.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename T>
T ValueOf(T value) {
  return value;
}

float ValueOf(Float16 value) {
  const int exponent = value.bits >> 10 & 0x1f;
  const int fraction = value.bits & 0x3ff;
  float magnitude;
  if (exponent == 0x1f) {
    magnitude = fraction == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(fraction + 0x400), exponent - 25);
  }
  return (value.bits & 0x8000) != 0 ? -magnitude : magnitude;
}

float ValueOf(BFloat16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

template <typename T>
bool IsNan(T value) {
  return value != value;
}

void AppendElement(std::string& bytes, const std::string& element) {
  const uint32_t length = static_cast<uint32_t>(element.size());
  bytes.append(reinterpret_cast<const char*>(&length), sizeof(length));
  bytes += element;
}

// Of one item.
template <typename T>
void AppendBest(const std::byte* data, int64_t classes, int64_t k,
                absl::Span<const std::string> labels, std::string& bytes) {
  const auto value = [data](int64_t i) {
    T element;
    std::memcpy(&element, data + static_cast<size_t>(i) * sizeof(T), sizeof(T));
    return ValueOf(element);
  };
  std::vector<int64_t> order(static_cast<size_t>(classes));
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int64_t a, int64_t b) {
    const auto left = value(a), right = value(b);
    if (IsNan(left) || IsNan(right)) return IsNan(left) == IsNan(right) ? a < b : IsNan(right);
    return left != right ? left > right : a < b;
  });
  for (int64_t i = 0; i < k; ++i) {
    const size_t index = static_cast<size_t>(order[i]);
    std::string element = absl::StrCat(std::to_string(value(order[i])), ":", index);
    if (index < labels.size()) absl::StrAppend(&element, ":", labels[index]);
    AppendElement(bytes, element);
  }
}

using Append = void (*)(const std::byte*, int64_t, int64_t, absl::Span<const std::string>,
                        std::string&);

// Null for a type without an order.
Append AppendOf(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
      return AppendBest<uint8_t>;
    case DType::kUint16:
      return AppendBest<uint16_t>;
    case DType::kUint32:
      return AppendBest<uint32_t>;
    case DType::kUint64:
      return AppendBest<uint64_t>;
    case DType::kInt8:
      return AppendBest<int8_t>;
    case DType::kInt16:
      return AppendBest<int16_t>;
    case DType::kInt32:
      return AppendBest<int32_t>;
    case DType::kInt64:
      return AppendBest<int64_t>;
    case DType::kFloat16:
      return AppendBest<Float16>;
    case DType::kBFloat16:
      return AppendBest<BFloat16>;
    case DType::kFloat32:
      return AppendBest<float>;
    case DType::kFloat64:
      return AppendBest<double>;
    case DType::kBool:
    case DType::kBytes:
      return nullptr;
  }
  return nullptr;
}

}  // namespace

absl::StatusOr<Classes> BestClasses(DType dtype, const Shape& shape, bool batches,
                                    const std::byte* data, int64_t k,
                                    absl::Span<const std::string> labels) {
  const Append append = AppendOf(dtype);
  if (append == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("classification needs numbers, but the output is ", NameOf(dtype)));
  }
  const int64_t items = batches ? shape[0] : 1;
  int64_t classes = 1;
  for (size_t i = batches ? 1 : 0; i < shape.size(); ++i) classes *= shape[i];
  k = std::min(k, classes);
  Classes best;
  if (batches) best.shape.push_back(items);
  best.shape.push_back(k);
  for (int64_t item = 0; item < items; ++item) {
    append(data + static_cast<size_t>(item * classes) * SizeOf(dtype), classes, k, labels,
           best.bytes);
  }
  return best;
}

}  // namespace espalier::service
