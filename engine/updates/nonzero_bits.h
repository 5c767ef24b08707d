// nonzero_bits.h — one bit per element: non-zero or zero, changed or not. 64 elements a word, the
// first in the lowest bit; bits past the last element are 0.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "engine/updates/elements.h"

namespace espalier::updates {

// Bit i: element i has a magnitude other than 0.
template <typename Element>
std::vector<uint64_t> NonzeroBits(const typename Element::Bits* elements, int64_t count);

// Bit i: the elements differ.
template <typename Element>
std::vector<uint64_t> DifferentBits(const typename Element::Bits* a,
                                    const typename Element::Bits* b, int64_t count);

// Set bits of a word. std::popcount calls a function where the build is for any x86-64, and was a
// fifth of decoding a small delta of a sparse model.
constexpr int BitsIn(uint64_t word) {
  word -= word >> 1 & 0x5555555555555555;
  word = (word & 0x3333333333333333) + (word >> 2 & 0x3333333333333333);
  word = (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0f;
  return static_cast<int>(word * 0x0101010101010101 >> 56);
}

// Set bits in all.
int64_t CountBits(const std::vector<uint64_t>& words);

// Calls `visit` with the position of each set bit in [begin, end), in order, until one returns false.
// Returns whether none did.
template <typename Visit>
bool VisitBits(const std::vector<uint64_t>& words, int64_t begin, int64_t end, Visit visit) {
  for (int64_t first = begin & ~int64_t{63}; first < end; first += 64) {
    uint64_t word = words[static_cast<size_t>(first / 64)];
    if (first < begin) word &= ~uint64_t{0} << (begin - first);
    if (end - first < 64) word &= (uint64_t{1} << (end - first)) - 1;
    for (; word != 0; word &= word - 1) {
      if (!visit(static_cast<uint32_t>(first + std::countr_zero(word)))) return false;
    }
  }
  return true;
}

// Walks the set bits (or, with kSet false, the clear bits below `count`) in order: position of the
// rank-th one, for ranks that rise from call to call. O(words) for a whole walk.
template <bool kSet>
class RankWalker {
 public:
  RankWalker(const std::vector<uint64_t>& words, int64_t count) : words_(words), count_(count) {}
  // The rank-th bit must exist.
  int64_t PositionOf(int64_t rank) {
    for (;;) {
      const int here = BitsIn(Word(word_));
      if (rank < before_ + here) break;
      before_ += here;
      ++word_;
    }
    uint64_t word = Word(word_);
    for (int64_t skip = rank - before_; skip > 0; --skip) word &= word - 1;
    return static_cast<int64_t>(word_) * 64 + std::countr_zero(word);
  }

 private:
  uint64_t Word(size_t index) const {
    if constexpr (kSet) return words_[index];
    const int64_t left = count_ - static_cast<int64_t>(index) * 64;
    return ~words_[index] & (left >= 64 ? ~uint64_t{0} : (uint64_t{1} << left) - 1);
  }

  const std::vector<uint64_t>& words_;
  int64_t count_;
  size_t word_ = 0;
  int64_t before_ = 0;  // bits of this kind in the words before word_
};

}  // namespace espalier::updates
