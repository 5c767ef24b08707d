// word_coder.h — a binary range coder with a range of 64 bits, and bits as they are beside it: what mixed
// modes decode with. It shifts a word of 32 bits every few symbols, where range_coder.h shifts a byte
// at times that no processor can foresee, and takes unmodelled bits without a division.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

namespace espalier::updates {

class WordEncoder {
 public:
  // A bit whose probability of a 0 is `zero` / 2^16, in (0, 1). Returns all bits set for a 1, none for
  // a 0.
  uint32_t Code(uint32_t zero, bool bit) {
    const uint64_t bound = (range_ >> 16) * zero;
    if (bit) {
      low_ += bound;
      if (low_ < bound) Carry();
      range_ -= bound;
    } else {
      range_ = bound;
    }
    if (range_ >> 32 == 0) Shift();
    return 0u - static_cast<uint32_t>(bit);
  }
  bool CodeRare(uint32_t zero, bool bit) { return Code(zero, bit) & 1; }
  // `count` bits as they are, at most 32. Returns `value`.
  uint32_t Raw(uint32_t value, int count) {
    pending_ |= uint64_t{value} << held_;
    held_ += count;
    for (; held_ >= 8; held_ -= 8, pending_ >>= 8) raw_.push_back(static_cast<char>(pending_));
    return value;
  }
  // Of all numbers that decode to the same bits the one that ends in the most zeros, without up to
  // eight of its zero bytes: the decoder reads zeros past the end.
  std::string TakeCoded() {
    for (int zeros = 63; zeros >= 0; --zeros) {
      const uint64_t unit = uint64_t{1} << zeros, rounded = (low_ + unit - 1) & ~(unit - 1);
      // 0 where it wraps: then it is above low_ by 2^64 − low_, and carries.
      if (rounded - low_ >= range_) continue;
      if (rounded < low_) Carry();
      low_ = rounded;
      break;
    }
    Shift();
    Shift();
    for (int i = 0; i < 8 && !coded_.empty() && coded_.back() == 0; ++i) coded_.pop_back();
    return std::move(coded_);
  }
  std::string TakeRaw() {
    if (held_ > 0) raw_.push_back(static_cast<char>(pending_));
    return std::move(raw_);
  }

 private:
  void Shift() {
    for (int byte = 7; byte >= 4; --byte) coded_.push_back(static_cast<char>(low_ >> (8 * byte)));
    low_ <<= 32;
    range_ <<= 32;
  }
  void Carry() {
    for (size_t i = coded_.size(); i-- > 0;) {
      coded_[i] = static_cast<char>(coded_[i] + 1);
      if (coded_[i] != 0) return;
    }
  }

  std::string coded_, raw_;
  uint64_t low_ = 0, range_ = ~uint64_t{0}, pending_ = 0;
  int held_ = 0;
};

// Its words of raw bits are read as they lie in memory.
static_assert(std::endian::native == std::endian::little);

class WordDecoder {
 public:
  WordDecoder(absl::string_view coded, absl::string_view raw)
      : coded_(reinterpret_cast<const uint8_t*>(coded.data())),
        coded_end_(coded_ + coded.size()),
        raw_(reinterpret_cast<const uint8_t*>(raw.data())),
        raw_end_(raw_ + raw.size()) {
    Shift();
    Shift();
    range_ = ~uint64_t{0};
  }
  [[gnu::always_inline]] uint32_t Code(uint32_t zero, bool /*bit*/ = false) {
    const uint64_t bound = (range_ >> 16) * zero;
    const uint64_t mask = 0u - static_cast<uint64_t>(code_ >= bound);
    code_ -= bound & mask;
    range_ = (bound & ~mask) | ((range_ - bound) & mask);
    if (range_ >> 32 == 0) Shift();
    return static_cast<uint32_t>(mask);
  }
  // The same, for bits that are 0 as a rule: what comes next need not wait for them.
  [[gnu::always_inline]] bool CodeRare(uint32_t zero, bool /*bit*/ = false) {
    const uint64_t bound = (range_ >> 16) * zero;
    const bool is_set = code_ >= bound;
    if (__builtin_expect(is_set, false)) {
      code_ -= bound;
      range_ -= bound;
    } else {
      range_ = bound;
    }
    if (range_ >> 32 == 0) Shift();
    return is_set;
  }
  [[gnu::always_inline]] uint32_t Raw(uint32_t /*value*/, int count) {
    if (raw_end_ - raw_ >= 8) {
      // Without a branch on how much is held: whole bytes up to 56 bits or more; those of the next one
      // that come with them are the same when they come again.
      uint64_t next;
      std::memcpy(&next, raw_, sizeof(next));
      pending_ |= next << held_;
      raw_ += (63 - held_) >> 3;
      held_ |= 56;
    } else {
      pending_ &= (uint64_t{1} << held_) - 1;
      for (; held_ < count; held_ += 8) {
        if (raw_ != raw_end_) {
          pending_ |= uint64_t{*raw_++} << held_;
        } else {
          raw_overrun_ = true;
        }
      }
    }
    const auto value = static_cast<uint32_t>(pending_ & ((uint64_t{1} << count) - 1));
    pending_ >>= count;
    held_ -= count;
    return value;
  }
  // Everything was read: of the coded bytes no more than the encoder had cut off, of the others all and
  // the last one's rest is zeros.
  bool finished() const {
    return coded_ == coded_end_ && raw_ == raw_end_ && held_ < 8 && pending_ == 0 && !overrun();
  }
  bool overrun() const { return coded_overrun_ > 8 || raw_overrun_; }

 private:
  [[gnu::always_inline]] void Shift() {
    if (coded_end_ - coded_ >= 4) {
      uint32_t next;
      std::memcpy(&next, coded_, sizeof(next));
      code_ = code_ << 32 | __builtin_bswap32(next);
      coded_ += 4;
    } else {
      for (int i = 0; i < 4; ++i) {
        code_ <<= 8;
        if (coded_ != coded_end_) {
          code_ |= *coded_++;
        } else {
          ++coded_overrun_;
        }
      }
    }
    range_ <<= 32;
  }

  const uint8_t* coded_;
  const uint8_t* coded_end_;
  const uint8_t* raw_;
  const uint8_t* raw_end_;
  uint64_t code_ = 0, range_ = 0, pending_ = 0, coded_overrun_ = 0;
  int held_ = 0;
  bool raw_overrun_ = false;
};

}  // namespace espalier::updates
