// mixed_model.h — which of a segment's non-zeros changed, in modes kMixed and kMixedRepeats; by how much
// says step_model.h.
//
// Three things predict a change, and mixing.h weighs them: the exponent of the old value; what the
// column did in the rows above (a weight of an input that is always zero never moves); what the row
// did so far.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/updates/elements.h"
#include "engine/updates/mixing.h"

namespace espalier::updates {

template <typename Element>
class MixedChanges {
 public:
  using Bits = typename Element::Bits;

  explicit MixedChanges(uint32_t width) : columns_(width) {}

  // Whether any non-zero of the next row changed.
  template <typename Coder>
  [[gnu::always_inline]] bool RowChanges(Coder& coder, bool changes) {
    last_row_ = (last_row_ << 1 | CodeBit(coder, row_changes_[last_row_ & 3], changes)) & 3;
    seen_ = 0;
    return last_row_ & 1;
  }

  // Whether the non-zero of this row and `column` changed.
  template <typename Coder>
  [[gnu::always_inline]] bool Changes(Coder& coder, uint32_t column, Bits old_bits, bool changes) {
    uint8_t& changed_before = columns_[column];
    const uint32_t element_class = Element::ClassOf(old_bits);
    const bool changed = change_mixers_[(changed_before & 3) << 2 | (seen_ & 3)].Code(
        coder, change_by_class_[element_class][changed_before & 3],
        change_by_past_[changed_before & 63][seen_ & 7], changes);
    changed_before = static_cast<uint8_t>(changed_before << 1 | changed);
    seen_ = seen_ << 1 | changed;
    return changed;
  }

 private:
  std::vector<uint8_t> columns_;  // flags of the last non-zeros, the latest lowest
  uint32_t last_row_ = 3;         // RowChanges of the last two
  uint32_t seen_ = 0;             // Changes of this row, the latest lowest

  BitModel row_changes_[4];
  BitModel change_by_class_[Element::kClasses][4], change_by_past_[64][8];
  Mixer change_mixers_[16];
};

}  // namespace espalier::updates
