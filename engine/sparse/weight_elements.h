// weight_elements.h — the element types a weight may have, seen as bit patterns: conversions
// between layouts move bits, so NaN payloads, infinities and subnormals pass unchanged.
#pragma once

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "engine/sparse/layout_spec.h"
#include "engine/tensor/tensor.h"

namespace espalier::sparse {

// Landmarks of a floating-point format. The magnitude of a value is its bits without `sign`; it is
// zero, subnormal below `smallest_normal`, and infinite or NaN from `infinity` on.
struct FloatBits {
  uint32_t sign;
  uint32_t smallest_normal;
  uint32_t infinity;
};

// `dtype` is one that ValidateWeight accepts.
constexpr FloatBits FloatBitsOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {0x8000, 0x0400, 0x7c00};
    case DType::kBFloat16:
      return {0x8000, 0x0080, 0x7f80};
    default:
      return {0x80000000u, 0x00800000, 0x7f800000};
  }
}

// Calls fn with a value of the unsigned integer type as wide as `dtype`.
template <typename Fn>
auto WithBitsType(DType dtype, Fn&& fn) {
  return SizeOf(dtype) == sizeof(uint32_t) ? fn(uint32_t{}) : fn(uint16_t{});
}

// ±0.0 both count as zero: everything but the sign is shifted out of reach.
template <typename Bits>
constexpr bool IsNonzero(Bits bits) {
  return static_cast<Bits>(bits << 1) != 0;
}

// A weight is [out, in] with out, in ≥ 1 and f32, bf16 or f16 elements. InvalidArgument otherwise.
absl::Status ValidateWeight(const TensorView& weight);

// Indices are int32. ResourceExhausted when `count` of `what` exceeds that.
absl::Status FitsIndex(int64_t count, absl::string_view what);

}  // namespace espalier::sparse
