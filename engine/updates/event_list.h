// event_list.h — the events of a segment, found by comparing it with its base.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "engine/updates/segment_codec.h"

namespace espalier::updates {

struct Event {
  uint32_t position;
  uint32_t rank;        // among the base's non-zeros, or zeros
  uint32_t class_rank;  // among the base's non-zeros of the same class (exponent)
  uint32_t old_bits, new_bits;
};

inline constexpr int kMaxClasses = 256;

struct SegmentEvents {
  std::array<std::vector<Event>, kEventKinds> lists;
  // Of the base: how many non-zeros each class has, and its first position, in order of position.
  struct Opening {
    uint32_t position;
    uint32_t element_class;
  };
  std::array<uint32_t, kMaxClasses> class_sizes{};
  std::vector<Opening> openings;
  std::vector<uint64_t> nonzero;  // NonzeroBits of the base

  EventCounts counts() const;
};

template <typename Element>
SegmentEvents FindEvents(const typename Element::Bits* old_elements,
                         const typename Element::Bits* new_elements, int64_t count);

}  // namespace espalier::updates
