// packed_segment.h — a segment without its zeros: one bit an element and the non-zeros, and a bit for which zeros are
// negative (half of those that a mask leaves are). What a delta is decoded against: of a sparse tensor a seventh of its
// dense bytes, for each thread that decodes.
//
// Memory   Of n elements 5 n / 16 bytes, and the non-zeros.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "engine/updates/elements.h"
#include "engine/updates/nonzero_bits.h"

namespace espalier::updates {

class PackedSegment {
 public:
  PackedSegment() = default;
  PackedSegment(ElementKind kind, const void* elements, int64_t count) {
    Begin(kind, count);
    Append(elements, count);
  }
  // Empty; `count` elements are to come.
  void Begin(ElementKind kind, int64_t count);
  // A multiple of 64 of them, or the last.
  void Append(const void* elements, int64_t count);

  int64_t size() const { return size_; }
  int64_t nonzeros() const { return static_cast<int64_t>(elements_.size()) / SizeOf(kind_); }
  // [begin, end), with their zeros.
  void Unpack(int64_t begin, int64_t end, void* to) const;
  // Bit i: element i has a magnitude other than 0.
  const std::vector<uint64_t>& nonzero() const { return nonzero_; }
  // Non-zeros before each word of these.
  const std::vector<uint32_t>& before() const { return before_; }

  // `Element`: of the segment's kind.
  template <typename Element>
  typename Element::Bits At(uint32_t position) const {
    const uint64_t bit = uint64_t{1} << position % 64;
    if ((nonzero_[position / 64] & bit) != 0) return Elements<Element>()[RankOf(position)];
    return Element::Zero((negative_[position / 64] & bit) != 0);
  }
  // Calls `visit` with position and bits of each non-zero in [begin, end), in order, until one returns false. Returns
  // whether none did.
  template <typename Element, typename Visit>
  bool VisitNonzeros(int64_t begin, int64_t end, Visit visit) const {
    if (begin >= end) return true;
    const auto* next = Elements<Element>() + RankOf(static_cast<uint32_t>(begin));
    return VisitBits(nonzero_, begin, end,
                     [&](uint32_t position) { return visit(position, *next++); });
  }

 private:
  template <typename Element>
  void AppendElements(const typename Element::Bits* elements, int64_t count);
  template <typename Element>
  void UnpackElements(int64_t begin, int64_t end, typename Element::Bits* to) const;
  template <typename Element>
  const typename Element::Bits* Elements() const {
    return reinterpret_cast<const typename Element::Bits*>(elements_.data());
  }
  // Non-zeros before this element.
  uint32_t RankOf(uint32_t position) const {
    const uint64_t below = (uint64_t{1} << position % 64) - 1;
    return before_[position / 64] + static_cast<uint32_t>(BitsIn(nonzero_[position / 64] & below));
  }

  ElementKind kind_ = ElementKind::kByte;
  int64_t expected_ = 0, size_ = 0;
  std::vector<uint64_t> nonzero_, negative_;  // which elements are non-zeros, which are −0
  std::vector<uint32_t> before_;              // non-zeros before each word
  std::vector<char> elements_;                // the non-zeros
};

// Walks a segment's non-zeros (or, with kSet false, its zeros) in order: position of the rank-th one, for
// ranks that rise from call to call. O(words) for a whole walk.
template <bool kSet>
class RankWalker {
 public:
  explicit RankWalker(const PackedSegment& segment) : segment_(segment) {}
  // The rank-th one must exist.
  int64_t PositionOf(int64_t rank) {
    while (word_ + 1 < segment_.before().size() && Before(word_ + 1) <= rank) ++word_;
    uint64_t word = segment_.nonzero()[word_];
    if (!kSet) word = ~word;
    for (int64_t skip = rank - Before(word_); skip > 0; --skip) word &= word - 1;
    return static_cast<int64_t>(word_) * 64 + std::countr_zero(word);
  }

 private:
  int64_t Before(size_t word) const {
    const int64_t nonzeros = segment_.before()[word];
    return kSet ? nonzeros : static_cast<int64_t>(64 * word) - nonzeros;
  }

  const PackedSegment& segment_;
  size_t word_ = 0;
};

}  // namespace espalier::updates
