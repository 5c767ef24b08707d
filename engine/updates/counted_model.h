// counted_model.h — which of a segment's non-zeros changed, in mode kCounted; by how much says step_model.h.
//
// How likely a change is comes from one table, where mixed_model.h weighs two: by the exponent of the
// old value, and by how often its column changed so far, held against how often values of these
// exponents change as a rule. Such a count tells how far the column's steps reach after few changes
// already, and few changes are all that a small delta of 16-bit weights has to learn from. Non-zeros
// that do not change cost little to look at: a branch that is foreseen.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "engine/updates/elements.h"
#include "engine/updates/mixing.h"
#include "engine/updates/segment_codec.h"
#include "engine/updates/step_model.h"

namespace espalier::updates {

// What an encoder chooses and a record tells.
struct CountedOptions {
  static constexpr uint64_t kMostBits = 7;

  bool repeats = false;  // steps often have the length of the one before
  bool rows = false;     // for each row a bit tells whether it has a change
  bool past = false;     // a change is predicted by those just before it as well

  static constexpr CountedOptions FromBits(uint64_t bits) {
    return {.repeats = (bits & 1) != 0, .rows = (bits & 2) != 0, .past = (bits & 4) != 0};
  }
  constexpr uint64_t bits() const {
    return uint64_t{repeats} | uint64_t{rows} << 1 | uint64_t{past} << 2;
  }
};

// How a list tells its mode: kCounted with its options, kThreshold behind those.
inline constexpr int kCountedCode = static_cast<int>(Mode::kCounted);
inline constexpr int kThresholdCode =
    kCountedCode + static_cast<int>(CountedOptions::kMostBits) + 1;

constexpr uint8_t CodeOf(Mode mode, const CountedOptions& options) {
  if (mode == Mode::kThreshold) return kThresholdCode;
  return static_cast<uint8_t>(static_cast<int>(mode) +
                              (mode == Mode::kCounted ? static_cast<int>(options.bits()) : 0));
}
// False for a code that no list has.
constexpr bool ReadCode(int code, Mode& mode, CountedOptions& options) {
  if (code > kThresholdCode) return false;
  mode =
      code == kThresholdCode ? Mode::kThreshold : static_cast<Mode>(std::min(code, kCountedCode));
  if (mode == Mode::kCounted)
    options = CountedOptions::FromBits(static_cast<uint64_t>(code - kCountedCode));
  return true;
}

template <typename Element>
class CountedChanges {
 public:
  using Bits = typename Element::Bits;

  CountedChanges(uint32_t width, CountedOptions options)
      : rows_(options.rows), past_(options.past), columns_(width) {}

  // Whether any non-zero of the next row changed, or may have.
  template <typename Coder>
  [[gnu::always_inline]] bool RowChanges(Coder& coder, bool changes) {
    seen_ = 0;
    if (!rows_) return true;
    last_row_ = (last_row_ << 1 | CodeBit(coder, row_changes_[last_row_ & 3], changes)) & 3;
    return last_row_ & 1;
  }

  // Whether the non-zero of this row and `column` changed.
  template <typename Coder>
  [[gnu::always_inline]] bool Changes(Coder& coder, uint32_t column, Bits old_bits, bool changes) {
    Column& of = columns_[column];
    auto& of_class = by_class_[Element::ClassOf(old_bits)];
    BitModel& usual = of_class[0][kUsual];
    const uint32_t expected = (kOne - usual.probability()) >> 6;
    bool changed;
    if (!past_) {
      changed = CodeRareBit(coder, of_class[0][of.level], changes);
    } else if constexpr (Element::kBits == 32) {
      // Steps are longer than an ULP, if there is one at all: the exponent says nothing.
      changed = CodeRareBit(coder, by_past_[of.changed & 15][seen_ & 7][of.level / 2], changes);
      usual.Update(changed ? ~0u : 0u);
    } else {
      changed =
          CodeRareBit(coder, of_class[(of.changed & 1) << 1 | (seen_ & 1)][of.level], changes);
    }
    of.changed = static_cast<uint8_t>(of.changed << 1 | changed);
    seen_ = seen_ << 1 | changed;
    of.Count(changed, expected);
    return changed;
  }

 private:
  static constexpr uint32_t kOne = 1 << 22;
  static constexpr uint32_t kMostExpected = 60 << 16, kMostCounted = 254;
  static constexpr auto kSizes = [] {
    std::array<uint8_t, 256> sizes{};
    for (size_t i = 1; i < sizes.size(); ++i) sizes[i] = static_cast<uint8_t>(SizeOf(i));
    return sizes;
  }();
  static constexpr int32_t kLevels = 16, kUsual = 8;

  struct Column {
    uint32_t expected = 0;  // changes, in 1/65536
    uint8_t counted = 0;    // changes
    uint8_t level = kUsual;
    uint8_t changed = 0;  // flags of the last non-zeros, the latest lowest

    // Levels are half powers of two: one change more than counted against one more than expected, that
    // in quarters.
    [[gnu::always_inline]] void Count(bool change, uint32_t expected_change) {
      counted = static_cast<uint8_t>(counted + change);
      expected += expected_change;
      if (expected >= kMostExpected || counted == kMostCounted) {
        expected >>= 1;
        counted >>= 1;
      }
      const int32_t more = kSizes[counted + 1u] + 32 - kSizes[(expected >> 14) + 4];
      level = static_cast<uint8_t>(std::clamp(((more + 4) >> 3) + kUsual, 0, kLevels - 1));
    }
  };

  bool rows_, past_;
  std::vector<Column> columns_;
  uint32_t last_row_ = 3;  // RowChanges of the last two
  uint32_t seen_ = 0;      // Changes of this row, the latest lowest

  BitModel row_changes_[4];
  std::array<std::array<BitModel, kLevels>, 4> by_class_[Element::kClasses];
  BitModel by_past_[16][8][kLevels / 2];
};

}  // namespace espalier::updates
