// range_coder.h — a binary adaptive range coder (the carry-propagating construction of LZMA) and
// the models of numbers over it.
//
// A bit costs -log2 of the probability that its AdaptiveBit held for it. Probabilities have 15 bits:
// a bit that is all but certain costs 0.0007 bit, which counts when every weight of a tensor changed
// and each of its gaps is 0.
// The decoder reads zeros past the end of its input and says so (overrun()): the caller checks once
// at the end, not for every bit.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

namespace espalier::updates {

inline constexpr int kProbabilityBits = 15;

// The probability of a 0, learnt quickly at first and slowly later: the weight of a new observation
// is 1 / (1.5 + seen), and at least 1/128, which still follows a drift.
class AdaptiveBit {
 public:
  uint32_t probability() const { return zero_ >> 1; }  // in (0, 2^15)
  void Update(bool bit) {
    const int32_t target = bit ? kLeast : kMost;
    zero_ = static_cast<uint16_t>(
        zero_ +
        (((target - static_cast<int32_t>(zero_)) * static_cast<int32_t>(kRates[seen_])) >> 16));
    seen_ = static_cast<uint16_t>(seen_ + (seen_ + 1 < static_cast<int>(kRates.size())));
  }

  // All bits of `mask` set: a 1; none: a 0.
  void UpdateEven(uint32_t mask) {
    const int32_t target =
        kMost + static_cast<int32_t>(mask & static_cast<uint32_t>(kLeast - kMost));
    zero_ = static_cast<uint16_t>(
        zero_ +
        (((target - static_cast<int32_t>(zero_)) * static_cast<int32_t>(kRates[seen_])) >> 16));
    seen_ = static_cast<uint16_t>(seen_ + (seen_ + 1 < static_cast<int>(kRates.size())));
  }

 private:
  static constexpr int32_t kLeast = 32, kMost = 65536 - 32;
  static constexpr auto kRates = [] {
    std::array<uint16_t, 127> rates{};
    for (size_t i = 0; i < rates.size(); ++i) {
      // (2^16 · 2) / (3 + 2i), below 2^15 so that a product with a difference fits 32 bits
      const uint32_t rate = 131072 / (3 + 2 * static_cast<uint32_t>(i));
      rates[i] = static_cast<uint16_t>(rate > 32767 ? 32767 : rate);
    }
    return rates;
  }();

  uint16_t zero_ = 1 << 15;
  uint16_t seen_ = 0;
};

class RangeEncoder {
 public:
  void Bit(AdaptiveBit& model, bool bit) {
    const uint32_t bound = (range_ >> kProbabilityBits) * model.probability();
    if (bit) {
      low_ += bound;
      range_ -= bound;
    } else {
      range_ = bound;
    }
    model.Update(bit);
    Normalize();
  }
  // `count` bits, the high one first, each as likely as not.
  void Direct(uint32_t value, int count) {
    while (count > 0) {
      const int step = count > 16 ? 16 : count;
      count -= step;
      range_ >>= step;
      low_ += uint64_t{range_} * ((value >> count) & ((1u << step) - 1));
      Normalize();
    }
  }
  // Of all numbers that decode to the same bits, the one that ends in the most zeros, without up to
  // four of its zero bytes: the decoder reads zeros past the end.
  std::string Finish() {
    for (int zeros = 31; zeros >= 0; --zeros) {
      const uint64_t unit = uint64_t{1} << zeros, rounded = (low_ + unit - 1) & ~(unit - 1);
      if (rounded - low_ >= range_) continue;
      low_ = rounded;
      break;
    }
    for (int i = 0; i < 5; ++i) ShiftLow();
    for (int i = 0; i < 4 && !bytes_.empty() && bytes_.back() == 0; ++i) bytes_.pop_back();
    return std::move(bytes_);
  }
  size_t size() const { return bytes_.size(); }

 private:
  void Normalize() {
    while (range_ < (1u << 24)) {
      range_ <<= 8;
      ShiftLow();
    }
  }
  void ShiftLow() {
    if (low_ < 0xff000000u || low_ > 0xffffffffu) {
      const auto carry = static_cast<uint8_t>(low_ >> 32);
      if (started_) bytes_.push_back(static_cast<char>(cache_ + carry));
      for (; pending_ > 0; --pending_) bytes_.push_back(static_cast<char>(0xff + carry));
      cache_ = static_cast<uint8_t>(low_ >> 24);
      started_ = true;
    } else {
      ++pending_;
    }
    low_ = (low_ & 0x00ffffffu) << 8;
  }

  std::string bytes_;
  uint64_t low_ = 0, pending_ = 0;
  uint32_t range_ = 0xffffffffu;
  uint8_t cache_ = 0;
  bool started_ = false;  // the first byte out would be the carry of nothing
};

class RangeDecoder {
 public:
  explicit RangeDecoder(absl::string_view bytes)
      : next_(reinterpret_cast<const uint8_t*>(bytes.data())), end_(next_ + bytes.size()) {
    for (int i = 0; i < 4; ++i) code_ = code_ << 8 | Next();
  }
  bool Bit(AdaptiveBit& model) {
    const uint32_t bound = (range_ >> kProbabilityBits) * model.probability();
    const bool bit = code_ >= bound;
    if (bit) {
      code_ -= bound;
      range_ -= bound;
    } else {
      range_ = bound;
    }
    model.Update(bit);
    Normalize();
    return bit;
  }
  // The same for a bit that is hard to guess: without a branch, which the processor would guess wrong
  // every other time.
  uint32_t EvenBit(AdaptiveBit& model) {
    const uint32_t bound = (range_ >> kProbabilityBits) * model.probability();
    const uint32_t mask = 0u - static_cast<uint32_t>(code_ >= bound);
    code_ -= bound & mask;
    range_ = (bound & ~mask) | ((range_ - bound) & mask);
    model.UpdateEven(mask);
    Normalize();
    return mask & 1;
  }
  uint32_t Direct(int count) {
    uint32_t value = 0;
    while (count > 0) {
      const int step = count > 16 ? 16 : count;
      count -= step;
      range_ >>= step;
      uint32_t digit = code_ / range_;
      if (digit >> step) digit = (1u << step) - 1;  // only a damaged stream
      code_ -= digit * range_;
      value = value << step | digit;
      Normalize();
    }
    return value;
  }
  // Everything was read, and no more than the encoder had cut off: its last bytes may be zeros.
  bool finished() const { return next_ == end_ && overrun_ <= 4; }
  bool overrun() const { return overrun_ > 4; }

 private:
  void Normalize() {
    while (range_ < (1u << 24)) {
      range_ <<= 8;
      code_ = code_ << 8 | Next();
    }
  }
  uint8_t Next() {
    if (next_ != end_) return *next_++;
    ++overrun_;
    return 0;
  }

  const uint8_t* next_;
  const uint8_t* end_;
  uint32_t range_ = 0xffffffffu, code_ = 0;
  uint64_t overrun_ = 0;
};

// Numbers below 2^34: how many bits they have (three flags for 0, 1 and 2 bits, then a tree), then
// the kTop bits below the leading one by a tree for each length, then the rest as it is.
template <int kTop>
class AdaptiveNumber {
 public:
  static constexpr int kMaxBits = 34;

  void Encode(RangeEncoder& coder, uint64_t value) {
    const int length = std::bit_width(value);
    for (int i = 0; i < kFlags; ++i) {
      coder.Bit(flags_[i], length > i);
      if (length == i) return EncodeTail(coder, value, length);
    }
    uint32_t node = 1;
    for (int bit = kTreeBits - 1; bit >= 0; --bit) {
      const bool set = (length - kFlags) >> bit & 1;
      coder.Bit(lengths_[node], set);
      node = 2 * node + set;
    }
    EncodeTail(coder, value, length);
  }

  // At most 2^34 - 1, whatever the stream holds.
  uint64_t Decode(RangeDecoder& coder) {
    for (int i = 0; i < kFlags; ++i) {
      if (!coder.Bit(flags_[i])) return DecodeTail(coder, i);
    }
    uint32_t node = 1;
    // Of numbers that are alike the high bits are, too.
    for (int bit = 0; bit < kTreeBits; ++bit) {
      AdaptiveBit& model = lengths_[node];
      node = 2 * node + (bit < 2 ? coder.Bit(model) : coder.EvenBit(model));
    }
    return DecodeTail(coder, static_cast<int>(node - (1u << kTreeBits)) + kFlags);
  }

 private:
  static constexpr int kFlags = 3, kTreeBits = 5;

  void EncodeTail(RangeEncoder& coder, uint64_t value, int length) {
    if (length < 2) return;
    const int below = length - 1, modelled = below < kTop ? below : kTop;
    uint32_t node = 1;
    for (int i = 1; i <= modelled; ++i) {
      const bool set = value >> (below - i) & 1;
      coder.Bit(tops_[length][node], set);
      node = 2 * node + set;
    }
    const int raw = below - modelled;
    if (raw > 0) coder.Direct(static_cast<uint32_t>(value & ((uint64_t{1} << raw) - 1)), raw);
  }
  uint64_t DecodeTail(RangeDecoder& coder, int length) {
    if (length < 2) return static_cast<uint64_t>(length);
    const int below = length - 1, modelled = below < kTop ? below : kTop;
    uint32_t node = 1;
    for (int i = 1; i <= modelled; ++i) node = 2 * node + coder.EvenBit(tops_[length][node]);
    const int raw = below - modelled;
    return uint64_t{node} << raw | (raw > 0 ? coder.Direct(raw) : 0);
  }

  AdaptiveBit flags_[kFlags];
  AdaptiveBit lengths_[1 << kTreeBits];
  AdaptiveBit tops_[kMaxBits + 1][1 << kTop];
};

}  // namespace espalier::updates
