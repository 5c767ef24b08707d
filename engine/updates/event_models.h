// event_models.h — the adaptive models of mode kRange and kClassRange: what encoder and decoder must
// do alike.
//
// A Coder is RangeEncoder or RangeDecoder behind EncodeBits / DecodeBits; each model has one pair of
// functions, kept side by side.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/updates/elements.h"
#include "engine/updates/range_coder.h"

namespace espalier::updates {

// Modelled bits below the leading one. Gaps are all but geometric, so that more than three teach
// nothing; steps of an optimiser cluster around its learning rate, and six bits of the step in ULPs
// took 4 % off a delta of f32 weights (adaptive models start as even, so that more cost more to
// teach).
inline constexpr int kGapTopBits = 3, kStepTopBits = 6;

using GapModel = AdaptiveNumber<kGapTopBits>;

// A value that moved: away from zero or towards it (weight decay moves them all one way), how far.
template <typename Element>
struct ChangeModel {
  AdaptiveBit away;
  AdaptiveNumber<kStepTopBits> distance;

  void Encode(RangeEncoder& coder, uint32_t old_bits, uint32_t new_bits) {
    using Bits = typename Element::Bits;
    const int64_t step = Element::OrderOf(static_cast<Bits>(new_bits)) -
                         Element::OrderOf(static_cast<Bits>(old_bits));
    coder.Bit(away, (step > 0) == (Element::OrderOf(static_cast<Bits>(old_bits)) > 0));
    distance.Encode(coder, static_cast<uint64_t>(step < 0 ? -step : step) - 1);
  }
  // The ordered integer of the new value; the caller checks that it is one.
  int64_t Decode(RangeDecoder& coder, uint32_t old_bits) {
    const int64_t old_order = Element::OrderOf(static_cast<typename Element::Bits>(old_bits));
    const bool up = coder.Bit(away) == (old_order > 0);
    const auto size = static_cast<int64_t>(distance.Decode(coder)) + 1;
    return up ? old_order + size : old_order - size;
  }
};

// The zero that a drop leaves: w · mask keeps the sign of w, an assignment of 0 does not.
struct DropModel {
  AdaptiveBit negative[2];  // by the sign of the old value

  void Encode(RangeEncoder& coder, bool old_negative, bool zero_negative) {
    coder.Bit(negative[old_negative], zero_negative);
  }
  bool Decode(RangeDecoder& coder, bool old_negative) { return coder.Bit(negative[old_negative]); }
};

// A grown value: sign, exponent by a tree, the high seven bits of the mantissa by a tree for each
// exponent, the rest as it is.
template <typename Element>
class GrowModel {
 public:
  void Encode(RangeEncoder& coder, uint32_t bits) {
    if constexpr (Element::kSigned) coder.Bit(negative_, bits >> (Element::kBits - 1) & 1);
    uint32_t node = 1;
    for (int i = kExponent - 1; i >= 0; --i) {
      const bool set = bits >> (Element::kMantissaBits + i) & 1;
      coder.Bit(exponent_[node], set);
      node = 2 * node + set;
    }
    AdaptiveBit* const top = top_[node - (1u << kExponent)];
    node = 1;
    for (int i = 1; i <= kTop; ++i) {
      const bool set = bits >> (Element::kMantissaBits - i) & 1;
      coder.Bit(top[node], set);
      node = 2 * node + set;
    }
    if (kRaw > 0) coder.Direct(bits & ((1u << kRaw) - 1), kRaw);
  }
  uint32_t Decode(RangeDecoder& coder) {
    uint32_t sign = 0;
    if constexpr (Element::kSigned) sign = coder.Bit(negative_);
    uint32_t exponent = 1, mantissa = 1;
    for (int i = 0; i < kExponent; ++i) exponent = 2 * exponent + coder.Bit(exponent_[exponent]);
    exponent -= 1u << kExponent;
    for (int i = 0; i < kTop; ++i) mantissa = 2 * mantissa + coder.Bit(top_[exponent][mantissa]);
    mantissa -= 1u << kTop;
    if (kRaw > 0) mantissa = mantissa << kRaw | coder.Direct(kRaw);
    return (Element::kSigned ? sign << (Element::kBits - 1) : 0) |
           exponent << Element::kMantissaBits | mantissa;
  }

 private:
  static constexpr int kExponent = Element::kExponentBits;
  static constexpr int kTop = 7;
  static constexpr int kRaw = Element::kMantissaBits - kTop;

  AdaptiveBit negative_;
  AdaptiveBit exponent_[1 << kExponent];
  AdaptiveBit top_[1 << kExponent][1 << kTop];
};

}  // namespace espalier::updates
