#include "engine/updates/event_list.h"

#include "engine/updates/nonzero_bits.h"

namespace espalier::updates {
namespace {

template <typename Element>
EventKind KindOf(typename Element::Bits from, typename Element::Bits to) {
  if (Element::IsZero(from)) return Element::IsZero(to) ? EventKind::kFlip : EventKind::kGrow;
  return Element::IsZero(to) ? EventKind::kDrop : EventKind::kChange;
}

}  // namespace

EventCounts SegmentEvents::counts() const {
  EventCounts counts;
  for (int kind = 0; kind < kEventKinds; ++kind)
    counts.of[kind] = static_cast<int64_t>(lists[static_cast<size_t>(kind)].size());
  return counts;
}

template <typename Element>
SegmentEvents FindEvents(const typename Element::Bits* old_elements,
                         const typename Element::Bits* new_elements, int64_t count) {
  SegmentEvents events;
  const std::vector<uint64_t> different = DifferentBits<Element>(old_elements, new_elements, count);
  events.nonzero = NonzeroBits<Element>(old_elements, count);
  const std::vector<uint64_t>& nonzero = events.nonzero;
  uint32_t nonzeros = 0;  // before the position
  for (size_t word = 0; word < different.size(); ++word) {
    const uint64_t changed = different[word];
    const auto begin = static_cast<uint32_t>(64 * word);
    for (uint64_t left = nonzero[word] | changed; left != 0; left &= left - 1) {
      const int bit = std::countr_zero(left);
      const uint32_t position = begin + static_cast<uint32_t>(bit);
      const auto old_bits = old_elements[position];
      const bool is_nonzero = nonzero[word] >> bit & 1;
      const uint32_t element_class = is_nonzero ? Element::ClassOf(old_bits) : 0;
      if (changed >> bit & 1) {
        const auto new_bits = new_elements[position];
        events.lists[static_cast<size_t>(KindOf<Element>(old_bits, new_bits))].push_back(
            {position, is_nonzero ? nonzeros : position - nonzeros,
             events.class_sizes[element_class], old_bits, new_bits});
      }
      if (!is_nonzero) continue;
      if (events.class_sizes[element_class]++ == 0) {
        events.openings.push_back({position, element_class});
      }
      ++nonzeros;
    }
  }
  return events;
}

template SegmentEvents FindEvents<ByteElement>(const uint8_t*, const uint8_t*, int64_t);
template SegmentEvents FindEvents<Float16Element>(const uint16_t*, const uint16_t*, int64_t);
template SegmentEvents FindEvents<BFloat16Element>(const uint16_t*, const uint16_t*, int64_t);
template SegmentEvents FindEvents<Float32Element>(const uint32_t*, const uint32_t*, int64_t);

}  // namespace espalier::updates
