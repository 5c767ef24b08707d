// mixing.h — bits that two adaptive models predict together (logistic mixing, as in the PAQ
// compressors), in integers only: encoder and decoder agree on every machine.
//
// The mixed probability of a 0 is squash(Σ wᵢ · stretch(pᵢ)), stretch(p) = ln(p / (1 − p)) and squash
// its inverse; the weights follow the gradient of what the bit cost.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace espalier::updates {

// The probability of a 0 in 1/2^22 and how many bits it has seen, in one word: it is read and written
// several times a symbol. The weight of a new observation is 1 / (1.5 + seen), at least 1/128.
class BitModel {
 public:
  uint32_t probability() const { return word_ >> 10; }  // in (0, 2^22)

  // All bits of `mask` set: a 1; none: a 0.
  void Update(uint32_t mask) {
    const uint32_t seen = word_ & kSeen;
    const auto zero = static_cast<int32_t>(probability());
    const int32_t target =
        kMost + static_cast<int32_t>(mask & static_cast<uint32_t>(kLeast - kMost));
    const auto moved = static_cast<int32_t>((int64_t{target - zero} * kRates[seen]) >> 16);
    word_ = static_cast<uint32_t>(zero + moved) << 10 | (seen + (seen < kSeenMost));
  }

 private:
  static constexpr uint32_t kSeen = 1023, kSeenMost = 126;
  static constexpr int32_t kLeast = 1 << 10, kMost = (1 << 22) - kLeast;
  static constexpr auto kRates = [] {
    std::array<int32_t, kSeenMost + 1> rates{};
    for (size_t i = 0; i < rates.size(); ++i)
      rates[i] = static_cast<int32_t>(std::min<size_t>(32768, 131072 / (3 + 2 * i)));
    return rates;
  }();

  uint32_t word_ = 1u << 31;
};

// Coder is WordEncoder, which returns `bit`, or WordDecoder, which returns what it finds.
template <typename Coder>
[[gnu::always_inline]] inline bool CodeBit(Coder& coder, BitModel& model, bool bit) {
  const uint32_t mask = coder.Code(model.probability() >> 6, bit);
  model.Update(mask);
  return mask & 1;
}

// The same for a bit that is 0 as a rule.
template <typename Coder>
[[gnu::always_inline]] inline bool CodeRareBit(Coder& coder, BitModel& model, bool bit) {
  const bool is_set = coder.CodeRare(model.probability() >> 6, bit);
  model.Update(is_set ? ~0u : 0u);
  return is_set;
}

// 65536 / (1 + e^-x) at x = −8, −7.5, … 8.
inline constexpr std::array<int32_t, 33> kSquashKnots = {
    22,    36,    60,    98,    162,   267,   439,   720,   1179,  1921,  3108,
    4971,  7812,  11955, 17625, 24743, 32768, 40793, 47911, 53581, 57724, 60565,
    62428, 63615, 64357, 64816, 65097, 65269, 65374, 65438, 65476, 65500, 65514};

// At x = −8 + i / 256: straight lines between the knots.
inline constexpr auto kSquash = [] {
  std::array<uint16_t, 4096> table{};
  for (size_t i = 0; i < table.size(); ++i) {
    const int32_t low = kSquashKnots[i >> 7], high = kSquashKnots[(i >> 7) + 1];
    table[i] = static_cast<uint16_t>(low + (((high - low) * static_cast<int32_t>(i & 127)) >> 7));
  }
  return table;
}();

// By the top 12 bits of a probability, in 1/256: the least from −2047 on that squashes to their middle
// or more, at most 2047.
inline constexpr auto kStretch = [] {
  std::array<int16_t, 4096> table{};
  int32_t x = -2047;
  for (int32_t p = 0; p < 4096; ++p) {
    while (x < 2047 && kSquash[static_cast<size_t>(x + 2048)] < 16 * p + 8) ++x;
    table[static_cast<size_t>(p)] = static_cast<int16_t>(x);
  }
  return table;
}();

class Mixer {
 public:
  template <typename Coder>
  [[gnu::always_inline]] bool Code(Coder& coder, BitModel& first, BitModel& second, bool bit) {
    const int32_t x = kStretch[first.probability() >> 10], y = kStretch[second.probability() >> 10];
    const int64_t sum = (first_ * x + second_ * y) >> 16;
    const int32_t zero = kSquash[static_cast<size_t>(std::clamp<int64_t>(sum, -2047, 2047) + 2048)];
    const uint32_t mask = coder.Code(static_cast<uint32_t>(zero), bit);
    const int32_t error = static_cast<int32_t>(~mask & 65536) - zero;
    first_ += (x * error) >> kRateShift;
    second_ += (y * error) >> kRateShift;
    first.Update(mask);
    second.Update(mask);
    return mask & 1;
  }

 private:
  static constexpr int kRateShift = 16;

  // In 1/65536. Whatever a segment holds they stay below 2^40: a bit moves them by 2048 at most.
  int64_t first_ = 40960, second_ = 40960;
};

}  // namespace espalier::updates
