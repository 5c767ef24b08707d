#include "engine/tensor/tensor.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace espalier {
namespace {

// Distinct types for the two 16-bit floats, so that one template serves all pairs of dtypes.
struct Half {
  uint16_t bits;
};
struct BHalf {
  uint16_t bits;
};

// Calls fn with a null pointer of the C++ type behind `dtype`.
template <typename Fn>
void WithType(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kBool:
      return fn(static_cast<bool*>(nullptr));
    case DType::kUint8:
      return fn(static_cast<uint8_t*>(nullptr));
    case DType::kUint16:
      return fn(static_cast<uint16_t*>(nullptr));
    case DType::kUint32:
      return fn(static_cast<uint32_t*>(nullptr));
    case DType::kUint64:
      return fn(static_cast<uint64_t*>(nullptr));
    case DType::kInt8:
      return fn(static_cast<int8_t*>(nullptr));
    case DType::kInt16:
      return fn(static_cast<int16_t*>(nullptr));
    case DType::kInt32:
      return fn(static_cast<int32_t*>(nullptr));
    case DType::kInt64:
      return fn(static_cast<int64_t*>(nullptr));
    case DType::kFloat16:
      return fn(static_cast<Half*>(nullptr));
    case DType::kFloat32:
      return fn(static_cast<float*>(nullptr));
    case DType::kFloat64:
      return fn(static_cast<double*>(nullptr));
    case DType::kBFloat16:
      return fn(static_cast<BHalf*>(nullptr));
    case DType::kBytes:
      return;
  }
}

// The widest exact arithmetic value of an element: integers stay integers, floats become float or double.
template <typename T>
auto Widen(T value) {
  if constexpr (std::is_same_v<T, Half>) {
    return Float16ToFloat(value.bits);
  } else if constexpr (std::is_same_v<T, BHalf>) {
    return BFloat16ToFloat(value.bits);
  } else {
    return value;
  }
}

template <typename T, typename From>
T Narrow(From value) {
  if constexpr (std::is_same_v<T, Half>) {
    return {FloatToFloat16(static_cast<float>(value))};
  } else if constexpr (std::is_same_v<T, BHalf>) {
    return {FloatToBFloat16(static_cast<float>(value))};
  } else if constexpr (std::is_same_v<T, bool>) {
    return value != From{0};
  } else if constexpr (std::is_integral_v<T> && std::is_floating_point_v<From>) {
    if (std::isnan(value)) return 0;
    // 2^digits is exact in any float type, the largest integer may not be.
    const From above = std::ldexp(From{1}, std::numeric_limits<T>::digits);
    if (value >= above) return std::numeric_limits<T>::max();
    if (value <= (std::is_signed_v<T> ? -above : From{0})) return std::numeric_limits<T>::min();
    return static_cast<T>(value);
  } else {
    return static_cast<T>(value);
  }
}

}  // namespace

float Float16ToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1f, mantissa = bits & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

uint16_t FloatToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu);  // NaN stays NaN
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;     // rounds to 65536 or is infinite
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal half, a multiple of 2^-24
    return sign |
           static_cast<uint16_t>(std::nearbyint(std::ldexp(std::bit_cast<float>(magnitude), 24)));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

float BFloat16ToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

uint16_t FloatToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

int64_t TensorView::elements() const {
  int64_t count = 1;
  for (int64_t dim : shape) count *= dim;
  return count;
}

absl::StatusOr<Tensor> Tensor::Allocate(DType dtype, absl::Span<const int64_t> shape) {
  if (dtype == DType::kBytes)
    return absl::InvalidArgumentError("a BYTES tensor has no fixed element size");
  auto elements = ElementCount(shape);
  if (!elements.ok()) return elements.status();
  if (*elements > (int64_t{1} << 62) / static_cast<int64_t>(SizeOf(dtype))) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", ToString(shape), " of ", NameOf(dtype), " is too large"));
  }
  auto buffer = Buffer::Allocate(static_cast<size_t>(*elements) * SizeOf(dtype));
  if (!buffer.ok()) return buffer.status();
  Tensor tensor;
  tensor.dtype_ = dtype;
  tensor.shape_.assign(shape.begin(), shape.end());
  tensor.elements_ = *elements;
  tensor.buffer_ = *std::move(buffer);
  return tensor;
}

absl::StatusOr<Tensor> Tensor::Clone() const {
  auto buffer = buffer_.Clone();
  if (!buffer.ok()) return buffer.status();
  Tensor copy;
  copy.dtype_ = dtype_;
  copy.shape_ = shape_;
  copy.elements_ = elements_;
  copy.buffer_ = *std::move(buffer);
  return copy;
}

void ConvertElements(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count) {
  if (count == 0) return;
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<size_t>(count) * SizeOf(to_dtype));
    return;
  }
  WithType(from_dtype, [&](auto* from_tag) {
    using From = std::remove_pointer_t<decltype(from_tag)>;
    WithType(to_dtype, [&](auto* to_tag) {
      using To = std::remove_pointer_t<decltype(to_tag)>;
      const From* source = static_cast<const From*>(from);
      To* target = static_cast<To*>(to);
      for (int64_t i = 0; i < count; ++i) target[i] = Narrow<To>(Widen(source[i]));
    });
  });
}

absl::StatusOr<Tensor> Convert(const TensorView& from, DType to) {
  if (from.dtype == DType::kBytes)
    return absl::InvalidArgumentError("BYTES elements cannot be converted to numbers");
  auto result = Tensor::Allocate(to, from.shape);
  if (!result.ok()) return result;
  ConvertElements(from.data, from.dtype, result->data(), to, result->elements());
  return result;
}

}  // namespace espalier
