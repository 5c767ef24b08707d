#include "engine/sparse/nonzero_map.h"

#include <algorithm>

namespace espalier::sparse {
namespace {

// Bit k of the result is set when bit 2k or 2k + 1 of `word` is.
uint64_t OrPairs(uint64_t word) {
  word = (word | word >> 1) & 0x5555555555555555u;
  word = (word | word >> 1) & 0x3333333333333333u;
  word = (word | word >> 2) & 0x0f0f0f0f0f0f0f0fu;
  word = (word | word >> 4) & 0x00ff00ff00ff00ffu;
  word = (word | word >> 8) & 0x0000ffff0000ffffu;
  return (word | word >> 16) & 0x00000000ffffffffu;
}

}  // namespace

int64_t NonzeroMap::Count() const {
  int64_t count = 0;
  for (const uint64_t word : bits_) count += std::popcount(word);
  return count;
}

NonzeroMap NonzeroMap::HalveRows() const {
  NonzeroMap half((rows_ + 1) / 2, cols_);
  for (int64_t r = 0; r < rows_; ++r) {
    uint64_t* target = half.row(r / 2);
    for (int64_t w = 0; w < words_; ++w) target[w] |= row(r)[w];
  }
  return half;
}

NonzeroMap NonzeroMap::HalveCols() const {
  NonzeroMap half(rows_, (cols_ + 1) / 2);
  for (int64_t r = 0; r < rows_; ++r) {
    uint64_t* target = half.row(r);
    for (int64_t w = 0; w < words_; ++w) target[w / 2] |= OrPairs(row(r)[w]) << (w % 2 * 32);
  }
  return half;
}

NonzeroMap NonzeroMap::Coarsen(int row_factor, int col_factor) const {
  NonzeroMap map = *this;
  for (; row_factor > 1; row_factor /= 2) map = map.HalveRows();
  for (; col_factor > 1; col_factor /= 2) map = map.HalveCols();
  return map;
}

std::vector<bool> NonzeroMap::Diagonals() const {
  // Row r contributes its cells at (c − r) mod P. Rotating whole rows by −r and OR-ing them handles
  // 64 cells at a time; the ring is unrolled to P + cols bits and folded at the end.
  const int64_t period = std::max(rows_, cols_);
  std::vector<uint64_t> ring((period + cols_) / 64 + 2);
  for (int64_t r = 0; r < rows_; ++r) {
    const int64_t start = r == 0 ? 0 : period - r;
    uint64_t* target = ring.data() + start / 64;
    const int shift = static_cast<int>(start % 64);
    for (int64_t w = 0; w < words_; ++w) {
      target[w] |= row(r)[w] << shift;
      if (shift != 0) target[w + 1] |= row(r)[w] >> (64 - shift);
    }
  }
  std::vector<bool> hit(period);
  for (int64_t bit = 0; bit < period + cols_; ++bit) {
    if ((ring[bit / 64] >> (bit % 64) & 1) == 0) continue;
    const int64_t forward = bit % period;  // (col − row) mod P
    // A tall (or square) matrix counts offsets the other way: (row − col) mod P.
    hit[rows_ >= cols_ ? (period - forward) % period : forward] = true;
  }
  return hit;
}

}  // namespace espalier::sparse
