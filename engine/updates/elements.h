// elements.h — the elements of a tensor as the codec sees them: bits, zero or not, sign, order.
//
// Floats   sign and magnitude: ±0 are the two zeros; every other bit pattern, NaN payloads and
//          infinities included, is a non-zero whose ordered integer is ±magnitude. Neighbouring
//          floats are neighbouring integers, so that the difference of two is a count of ULPs.
// Bytes    any other dtype, byte for byte: 0 is the only zero, the ordered integer is the byte as
//          two's complement.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

namespace espalier::updates {

enum class ElementKind : uint8_t { kByte = 0, kFloat16 = 1, kBFloat16 = 2, kFloat32 = 3 };
inline constexpr uint8_t kElementKinds = 4;

constexpr int SizeOf(ElementKind kind) {
  return kind == ElementKind::kByte ? 1 : kind == ElementKind::kFloat32 ? 4 : 2;
}

// "F16", "BF16" and "F32" (the names of safetensors) have a kind of their own.
constexpr ElementKind ElementKindOf(absl::string_view dtype) {
  return dtype == "F32"    ? ElementKind::kFloat32
         : dtype == "BF16" ? ElementKind::kBFloat16
         : dtype == "F16"  ? ElementKind::kFloat16
                           : ElementKind::kByte;
}

// Bits_: the element's unsigned type; kMantissaBits: below the exponent.
template <typename Bits_, int kMantissaBits_>
struct FloatElement {
  using Bits = Bits_;
  static constexpr bool kSigned = true;
  static constexpr int kBits = 8 * sizeof(Bits), kMantissaBits = kMantissaBits_;
  static constexpr int kExponentBits = kBits - 1 - kMantissaBits;
  static constexpr int kClasses = 1 << kExponentBits;
  static constexpr Bits kSignBit = static_cast<Bits>(Bits{1} << (kBits - 1));
  static constexpr Bits kMagnitude = static_cast<Bits>(kSignBit - 1);

  static constexpr bool IsZero(Bits bits) { return (bits & kMagnitude) == 0; }
  static constexpr bool IsNegative(Bits bits) { return (bits & kSignBit) != 0; }
  // Of a non-zero: its exponent field.
  static constexpr uint32_t ClassOf(Bits bits) {
    return static_cast<uint32_t>((bits & kMagnitude) >> kMantissaBits);
  }
  // Of a non-zero: never 0.
  static constexpr int64_t OrderOf(Bits bits) {
    const auto magnitude = static_cast<int64_t>(bits & kMagnitude);
    return IsNegative(bits) ? -magnitude : magnitude;
  }
  static constexpr bool IsOrder(int64_t order) {
    return order != 0 && order >= -int64_t{kMagnitude} && order <= int64_t{kMagnitude};
  }
  static constexpr Bits FromOrder(int64_t order) {
    return static_cast<Bits>(order < 0 ? static_cast<Bits>(-order) | kSignBit
                                       : static_cast<Bits>(order));
  }
  static constexpr Bits Zero(bool negative) { return negative ? kSignBit : Bits{0}; }
};

struct ByteElement {
  using Bits = uint8_t;
  static constexpr bool kSigned = false;
  static constexpr int kBits = 8, kMantissaBits = 7, kExponentBits = 1, kClasses = 1;

  static constexpr bool IsZero(Bits bits) { return bits == 0; }
  static constexpr bool IsNegative(Bits) { return false; }
  static constexpr uint32_t ClassOf(Bits) { return 0; }
  static constexpr int64_t OrderOf(Bits bits) { return static_cast<int8_t>(bits); }
  static constexpr bool IsOrder(int64_t order) {
    return order != 0 && order >= INT8_MIN && order <= INT8_MAX;
  }
  static constexpr Bits FromOrder(int64_t order) { return static_cast<Bits>(order); }
  static constexpr Bits Zero(bool) { return 0; }
};

// Bits that are not interpreted: −0 is not a zero.
template <typename Bits_>
struct PlainElement {
  using Bits = Bits_;
  static constexpr bool kSigned = false;
  static constexpr bool IsZero(Bits bits) { return bits == 0; }
};

using Float16Element = FloatElement<uint16_t, 10>;
using BFloat16Element = FloatElement<uint16_t, 7>;
using Float32Element = FloatElement<uint32_t, 23>;

// Of a non-zero: how far its order is from 0.
template <typename Element>
constexpr uint64_t MagnitudeOf(typename Element::Bits bits) {
  const int64_t order = Element::OrderOf(bits);
  return static_cast<uint64_t>(order < 0 ? -order : order);
}

// Calls `visit` with a value of the element type of `kind`.
template <typename Visit>
auto VisitElement(ElementKind kind, Visit visit) {
  switch (kind) {
    case ElementKind::kFloat16:
      return visit(Float16Element());
    case ElementKind::kBFloat16:
      return visit(BFloat16Element());
    case ElementKind::kFloat32:
      return visit(Float32Element());
    case ElementKind::kByte:
      break;
  }
  return visit(ByteElement());
}

}  // namespace espalier::updates
