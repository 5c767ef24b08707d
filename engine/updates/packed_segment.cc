#include "engine/updates/packed_segment.h"

#include <algorithm>

namespace espalier::updates {
namespace {

constexpr int64_t kPiece = 8 << 10;  // elements
constexpr size_t kStep = 64 << 10;   // elements

}  // namespace

void PackedSegment::Begin(ElementKind kind, int64_t count) {
  kind_ = kind;
  expected_ = count;
  size_ = 0;
  nonzero_.clear();
  negative_.clear();
  before_.clear();
  elements_.clear();
  const auto words = static_cast<size_t>((count + 63) / 64);
  nonzero_.reserve(words);
  negative_.reserve(words);
  before_.reserve(words);
}

// Each is looked at three times: while it is in the cache.
void PackedSegment::Append(const void* elements, int64_t count) {
  VisitElement(kind_, [&](auto element) {
    const auto* from = static_cast<const typename decltype(element)::Bits*>(elements);
    for (int64_t at = 0; at < count; at += kPiece)
      AppendElements<decltype(element)>(from + at, std::min(kPiece, count - at));
  });
}

template <typename Element>
void PackedSegment::AppendElements(const typename Element::Bits* elements, int64_t count) {
  using Bits = typename Element::Bits;
  const std::vector<uint64_t> nonzero = NonzeroBits<Element>(elements, count);
  const std::vector<uint64_t> present = NonzeroBits<PlainElement<Bits>>(elements, count);
  const size_t known = elements_.size() / sizeof(Bits), first = before_.size();
  size_t rank = known;
  before_.resize(first + nonzero.size());
  negative_.resize(first + nonzero.size());
  for (size_t word = 0; word < nonzero.size(); ++word) {
    before_[first + word] = static_cast<uint32_t>(rank);
    negative_[first + word] = present[word] & ~nonzero[word];
    rank += static_cast<size_t>(BitsIn(nonzero[word]));
  }
  nonzero_.insert(nonzero_.end(), nonzero.begin(), nonzero.end());
  // Once, as if the rest were like the beginning: growing by doubling would take half as much again. In
  // steps, so that the next segment, a bit fuller, fits into the same place.
  if (size_ == 0) {
    const auto all = static_cast<size_t>(expected_), here = static_cast<size_t>(count);
    const size_t expected = rank * (all / here + 1) * 9 / 8;
    elements_.reserve(sizeof(Bits) * std::min(all, (expected / kStep + 1) * kStep));
  }
  elements_.resize(rank * sizeof(Bits));
  Compact(nonzero, elements, elements_.data() + known * sizeof(Bits));
  size_ += count;
}

void PackedSegment::Unpack(int64_t begin, int64_t end, void* to) const {
  VisitElement(kind_, [&](auto element) {
    using Element = decltype(element);
    UnpackElements<Element>(begin, end, static_cast<typename Element::Bits*>(to));
  });
}

template <typename Element>
void PackedSegment::UnpackElements(int64_t begin, int64_t end, typename Element::Bits* to) const {
  using Bits = typename Element::Bits;
  std::memset(to, 0, static_cast<size_t>(end - begin) * sizeof(Bits));
  VisitNonzeros<Element>(begin, end, [&](uint32_t position, Bits bits) {
    to[position - begin] = bits;
    return true;
  });
  if constexpr (Element::kSigned) {
    VisitBits(negative_, begin, end, [&](uint32_t position) {
      to[position - begin] = Element::Zero(true);
      return true;
    });
  }
}

}  // namespace espalier::updates
