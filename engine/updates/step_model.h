// step_model.h — by how much a value changed: the steps of modes kMixed, kMixedRepeats and kCounted.
//
// The elements of a segment are seen as rows of a width that the list names, that of the tensor's
// rows. A step's size follows those of its column (Adam's step has the size of the input against its
// recent past) and those of all steps lately; its sign follows the row's (a neuron has one gradient for
// all its weights, so that their signs agree as those of the inputs do).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "engine/updates/elements.h"
#include "engine/updates/mixing.h"

namespace espalier::updates {

// 16 · log2 of it, all but: the four bits below the leading one are taken as they are.
constexpr int32_t SizeOf(uint64_t magnitude) {
  const int length = std::bit_width(magnitude);
  const uint64_t top = length > 5 ? magnitude >> (length - 5) : magnitude << (5 - length);
  return (length - 1) * 16 + static_cast<int32_t>(top & 15);
}

template <typename Element>
class StepModel {
 public:
  using Bits = typename Element::Bits;

  StepModel(uint32_t width, bool repeats) : repeats_(repeats), columns_(width) {}

  // The difference of orders of an element that changed; any but 0.
  template <typename Coder>
  int64_t Step(Coder& coder, uint32_t column, uint32_t position, Bits old_bits, int64_t step) {
    Column& of = columns_[column];
    const auto element_class = static_cast<int32_t>(Element::ClassOf(old_bits));
    const int32_t exponent = element_class << kShift;
    const uint32_t gap = Gap(position - last_position_);
    last_position_ = position;

    const uint32_t lean = static_cast<uint32_t>(lean_ >> 12) + 8;
    const bool up = CodeBit(coder, ups_[lean][gap][last_up_], step > 0);

    uint64_t magnitude = Magnitude(step);
    if (!repeats_ || !Repeat(coder, element_class, magnitude)) {
      const int32_t expected = Expected(of) - exponent;
      const int length = Length(coder, of, expected, exponent, gap, std::bit_width(magnitude));
      magnitude = Rest(coder, length, expected, magnitude);
      repeatable_ = {magnitude, element_class};
    }

    const int32_t size = SizeOf(magnitude) + exponent;
    if (of.size == kUnknown) of.size = static_cast<int16_t>(size_);
    of.size = static_cast<int16_t>(of.size + (((size - of.size) * kColumnRate) >> 6));
    size_ += ((size - size_) * kRate) >> 6;
    last_size_ = size;
    last_up_ = up;
    lean_ += ((up ? 32767 : -32768) - lean_) >> 4;
    return up ? static_cast<int64_t>(magnitude) : -static_cast<int64_t>(magnitude);
  }

 private:
  // Sizes of steps are in 1/16 of a power of two; that of a value's unit in the last place is 16 times
  // its exponent field.
  static constexpr int kShift = 4;
  static constexpr int16_t kUnknown = INT16_MIN;
  static constexpr int kRate = 4, kColumnRate = 16;
  static constexpr int kMaxLength = 33;
  static constexpr uint32_t kGaps = 5;
  static constexpr int kTopBits = Element::kBits == 32 ? 1 : 2;
  static constexpr int kNearBits = 3;
  static constexpr uint64_t kNear = 1 << kNearBits;

  struct Column {
    int16_t size = kUnknown;  // of its steps, averaged
  };

  static uint64_t Magnitude(int64_t step) { return static_cast<uint64_t>(std::abs(step)); }
  static uint32_t Gap(uint32_t gap) {
    return gap == 1 ? 0 : gap == 2 ? 1 : gap <= 4 ? 2 : gap <= 16 ? 3 : 4;
  }
  int32_t Expected(const Column& of) const {
    return of.size == kUnknown ? size_ : (of.size + size_) >> 1;
  }

  // Whether a step is the one before in another exponent's units, all but. Adam moves a weight that has
  // seen one gradient so far, a row of an embedding most of all, by a distance that does not depend on
  // that gradient. Of a run of repeats the one of the finest unit is what the next ones are held against.
  template <typename Coder>
  bool Repeat(Coder& coder, int32_t element_class, uint64_t& magnitude) {
    const int32_t finer = repeatable_.element_class - element_class;  // by so many bits
    if (finer > 8 || finer < -32) return false;
    const uint64_t predicted =
        finer >= 0 ? repeatable_.magnitude << finer
                   : (repeatable_.magnitude + (uint64_t{1} << (-finer - 1))) >> -finer;
    if (predicted < 2 * kNear || predicted >> 32 != 0) return false;
    const uint64_t beyond = magnitude - predicted + kNear;  // may wrap
    const bool repeat =
        CodeBit(coder, repeat_models_[repeated_ & 15], magnitude != 0 && beyond < 2 * kNear);
    repeated_ = repeated_ << 1 | repeat;
    if (!repeat) return false;
    uint32_t node = 1;
    for (int bit = kNearBits; bit >= 0; --bit)
      node = node << 1 | CodeBit(coder, near_[node], beyond >> bit & 1);
    magnitude = predicted + (node & (2 * kNear - 1)) - kNear;
    if (finer >= 0) repeatable_ = {magnitude, element_class};
    return true;
  }

  // The bit length of the step: at least that expected or less, then on from there one at a time.
  template <typename Coder>
  int Length(Coder& coder, const Column& of, int32_t expected, int32_t exponent, uint32_t gap,
             int length) {
    const int centre = std::clamp((expected >> kShift) + 1, 1, kMaxLength);
    const int32_t begin = (centre - 1) << kShift;
    const auto relative = [&](int32_t size, int shift) {
      return static_cast<uint32_t>(std::clamp((size - exponent - begin) >> shift, -8, 7) + 8);
    };
    const uint32_t by_last = relative(last_size_, 3);
    const auto at_least = [&](int candidate) {
      const auto node = static_cast<uint32_t>(std::clamp(candidate - centre, -8, 7) + 8);
      // Steps of a few ULPs are not as smooth as longer ones: how long they are matters by itself.
      BitModel* by_size;
      if constexpr (Element::kBits == 32) {
        const uint32_t by_column = of.size == kUnknown ? 16 : relative(of.size, 2);
        by_size = &length_by_size_[node][by_column][relative(size_, 2)];
      } else {
        const int fine = (std::clamp(expected - begin, -8, 23) + 8) >> 1;
        by_size = &length_by_size_[node][std::min(centre, 16)][fine];
      }
      return length_mixers_[node].Code(
          coder, *by_size, length_by_last_[node][by_last][std::min(gap, 3u)], length >= candidate);
    };
    int candidate = centre;
    if (at_least(candidate + 1)) {
      for (++candidate; candidate < kMaxLength && at_least(candidate + 1);) ++candidate;
    } else {
      for (; candidate > 1 && !at_least(candidate);) --candidate;
    }
    return candidate;
  }

  // The bits below the leading one.
  template <typename Coder>
  uint64_t Rest(Coder& coder, int length, int32_t expected, uint64_t magnitude) {
    const int below = length - 1, modelled = std::min(below, kTopBits);
    auto& tops =
        tops_[std::min(length, 31)][std::clamp((expected >> kShift) + 1 - length, -2, 1) + 2];
    uint32_t node = 1;
    for (int i = 1; i <= modelled; ++i)
      node = node << 1 | CodeBit(coder, tops[node], magnitude >> (below - i) & 1);
    const int raw = below - modelled;
    if (raw == 0) return node;
    return uint64_t{node} << raw |
           coder.Raw(static_cast<uint32_t>(magnitude & ((uint64_t{1} << raw) - 1)), raw);
  }

  bool repeats_;
  std::vector<Column> columns_;
  uint32_t last_position_ = 0, last_up_ = 0;
  int32_t lean_ = 0;         // to which side the last steps went, in 1/32768
  int32_t size_ = 100 << 4;  // of all steps, averaged
  int32_t last_size_ = 100 << 4;

  struct {
    uint64_t magnitude;
    int32_t element_class;
  } repeatable_ = {0, 0};
  uint32_t repeated_ = 0;  // flags of the last ones, the latest lowest

  BitModel repeat_models_[16], near_[2 * kNear];
  BitModel ups_[16][kGaps][2];
  BitModel length_by_size_[16][17][16], length_by_last_[16][16][4];
  BitModel tops_[32][4][1 << kTopBits];
  Mixer length_mixers_[16];
};

}  // namespace espalier::updates
