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

// Copies the elements whose bits are set to `to`, one behind the other; `to` need not be aligned. Returns their end.
template <typename Bits>
char* Compact(const std::vector<uint64_t>& words, const Bits* elements, char* to);

// The vectors that all of this is done with: the widest that the processor has, up to `most`. For tests.
enum class Vectors : uint8_t { kNone, kAvx2, kAvx512 };
Vectors LimitVectors(Vectors most);

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

}  // namespace espalier::updates
