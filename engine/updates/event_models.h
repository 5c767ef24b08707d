// event_models.h — the adaptive models of mode kRange and kClassRange: what encoder and decoder must
// do alike.
//
// A Coder is RangeEncoder or RangeDecoder behind EncodeBits / DecodeBits; each model has one pair of
// functions, kept side by side.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>

#include "engine/updates/elements.h"
#include "engine/updates/range_coder.h"

namespace espalier::updates {

// Modelled bits below the leading one. Gaps are all but geometric. Steps of f32 weights are noise
// below their size: two bits were 1 to 2 % smaller than six on deltas of a hundred steps, which have
// to be taught, and a third faster to decode.
inline constexpr int kGapTopBits = 3, kStepTopBits = 2;

using GapModel = AdaptiveNumber<kGapTopBits>;

// Values that moved: away from zero or towards it, and how far. What the values before did predicts
// both. Neighbours in a row of a layer see inputs that are alike (pixels, activations that are never
// negative), so that their steps tend to have one direction; and all steps are of the size of the
// learning rate, so that an f32's step in ULPs follows from its exponent. For 16-bit floats that is
// too coarse, their steps are one ULP or two: there the class of the old value picks the models.
template <typename Element>
class ChangeModel {
 public:
  using Bits = typename Element::Bits;

  void Encode(RangeEncoder& coder, uint32_t position, uint32_t old_bits, uint32_t new_bits) {
    const int64_t from = Element::OrderOf(static_cast<Bits>(old_bits));
    const int64_t step = Element::OrderOf(static_cast<Bits>(new_bits)) - from;
    coder.Bit(Away(position, from), (step > 0) == (from > 0));
    const uint64_t distance = static_cast<uint64_t>(step < 0 ? -step : step);
    Distance(old_bits).Encode(coder, distance - 1);
    Learn(position, old_bits, distance, step > 0);
  }
  // The ordered integer of the new value; the caller checks that it is one.
  int64_t Decode(RangeDecoder& coder, uint32_t position, uint32_t old_bits) {
    const int64_t from = Element::OrderOf(static_cast<Bits>(old_bits));
    const bool up = (coder.EvenBit(Away(position, from)) != 0) == (from > 0);
    const uint64_t distance = Distance(old_bits).Decode(coder) + 1;
    Learn(position, old_bits, distance, up);
    return up ? from + static_cast<int64_t>(distance) : from - static_cast<int64_t>(distance);
  }

 private:
  using DistanceModel = AdaptiveNumber<kStepTopBits>;
  static constexpr bool kPredicts = Element::kBits == 32;
  static constexpr int kPredictions = 40;

  AdaptiveBit& Away(uint32_t position, int64_t from) {
    const uint32_t gap = position - last_position_;
    return away_[gap == 1 ? 0 : gap == 2 ? 1 : gap <= 4 ? 2 : gap <= 16 ? 3 : 4][up_ == (from > 0)];
  }
  DistanceModel& Distance(uint32_t old_bits) {
    uint32_t index = Element::ClassOf(static_cast<Bits>(old_bits));
    if constexpr (kPredicts) {
      const int32_t predicted = (size_ - static_cast<int32_t>(index << kShift)) >> (kShift - 1);
      index = static_cast<uint32_t>(std::clamp<int32_t>(predicted, 0, kPredictions - 1));
    }
    if (!distances_[index]) distances_[index] = std::make_unique<DistanceModel>();
    return *distances_[index];
  }
  void Learn(uint32_t position, uint32_t old_bits, uint64_t distance, bool up) {
    last_position_ = position;
    up_ = up;
    if constexpr (kPredicts) {
      const auto size = static_cast<int32_t>(
          (std::bit_width(distance) + Element::ClassOf(static_cast<Bits>(old_bits))) << kShift);
      size_ += (size - size_) >> kRate;
    }
  }
  static constexpr int kShift = 6, kRate = 4;

  AdaptiveBit away_[5][2];
  uint32_t last_position_ = 0;
  bool up_ = false;
  int32_t size_ = 100 << 6;  // of steps: bits of the distance + exponent, in 1/64, averaged
  std::array<std::unique_ptr<DistanceModel>, kPredicts ? kPredictions : Element::kClasses>
      distances_;
};

// The zero that a drop leaves: w · mask keeps the sign of w, an assignment of 0 does not.
struct DropModel {
  AdaptiveBit negative[2];  // by the sign of the old value

  void Encode(RangeEncoder& coder, bool old_negative, bool zero_negative) {
    coder.Bit(negative[old_negative], zero_negative);
  }
  bool Decode(RangeDecoder& coder, bool old_negative) { return coder.Bit(negative[old_negative]); }
};

// Which of the magnitudes from `low` on, below `high`, drop: the larger the rarer.
class ThresholdModel {
 public:
  ThresholdModel(uint64_t low, uint64_t high) : low_(low), width_(high - low) {}
  AdaptiveBit& Between(uint64_t magnitude) { return drops_[(magnitude - low_) * kParts / width_]; }

 private:
  static constexpr uint64_t kParts = 16;
  uint64_t low_, width_;
  AdaptiveBit drops_[kParts];
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
    Tops& top = TopsOf(node - (1u << kExponent));
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
    Tops& top = TopsOf(exponent);
    for (int i = 0; i < kTop; ++i) mantissa = 2 * mantissa + coder.EvenBit(top[mantissa]);
    mantissa -= 1u << kTop;
    if (kRaw > 0) mantissa = mantissa << kRaw | coder.Direct(kRaw);
    return (Element::kSigned ? sign << (Element::kBits - 1) : 0) |
           exponent << Element::kMantissaBits | mantissa;
  }

 private:
  static constexpr int kExponent = Element::kExponentBits;
  static constexpr int kTop = 7;
  static constexpr int kRaw = Element::kMantissaBits - kTop;
  using Tops = std::array<AdaptiveBit, 1 << kTop>;

  Tops& TopsOf(uint32_t exponent) {
    if (!tops_[exponent]) tops_[exponent] = std::make_unique<Tops>();
    return *tops_[exponent];
  }

  AdaptiveBit negative_;
  AdaptiveBit exponent_[1 << kExponent];
  std::unique_ptr<Tops> tops_[1 << kExponent];  // those that are met: few
};

}  // namespace espalier::updates
