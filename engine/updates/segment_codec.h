// segment_codec.h — what changed in a run of elements, as four lists of events coded against the
// old ones.
//
//   change  rank among the old non-zeros    how many ULPs the value moved, and whether towards zero
//   drop    rank among the old non-zeros    the sign of the zero that it leaves
//   grow    rank among the old zeros        the value
//   flip    rank among the old zeros        +0 becomes −0, or the reverse
//
// Each list has the smallest of the modes below (FORMAT.md has the bytes). All are decoded against
// the base, whose digest the caller has checked; a damaged or malicious record gives an error or
// other edits, never an edit that breaks a rule of its list.
//
// Memory   Encode: 24 bytes an event and 2 bits an element beside the caller's. Decode: 12 bytes an
//          event and 1 bit an element. Mixed modes: up to 10 bytes a column more. Neither depends on anything
//          a record claims.
// Errors   InvalidArgument: which list, what was expected and got.
// Thread-safe: no shared state.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/updates/elements.h"
#include "engine/updates/packed_segment.h"

namespace espalier::updates {

// Of delta files: what is written. FORMAT.md says what is read.
inline constexpr uint16_t kFormatVersion = 2;

// Tensors are cut into segments of this many elements, the last one shorter: the unit of memory, of
// parallel work and of adaptive models. The models of a new segment cost about 1 KiB; at 4 Mi
// elements that is below 1 % of a delta that changes 1 % of a dense tensor.
inline constexpr int64_t kSegmentElements = int64_t{1} << 22;

enum class EventKind : uint8_t { kChange = 0, kDrop = 1, kGrow = 2, kFlip = 3 };
inline constexpr int kEventKinds = 4;
const char* NameOf(EventKind kind);  // "change", …

enum class Mode : uint8_t {
  kRaw = 0,           // rank and value as they are
  kZstd = 1,          // gaps and symbols as varints, compressed
  kRange = 2,         // gaps and symbols through adaptive models and a range coder
  kClassRange = 3,    // the same, ranks and models apart for each exponent; changes and drops only
  kMixed = 4,         // each non-zero's change or none, predicted by row and column; changes only
  kMixedRepeats = 5,  // the same, for steps that often have the length of the one before
  kCounted = 6,       // the same as both, changes predicted by how often their column changed
  kThreshold = 7,     // those of the least magnitude, all but; drops only
};
inline constexpr uint8_t kModes = 8;
// Each non-zero is looked at; changes only.
constexpr bool IsMixed(Mode mode) { return mode >= Mode::kMixed && mode <= Mode::kCounted; }

struct EventCounts {
  int64_t of[kEventKinds] = {};

  int64_t total() const { return of[0] + of[1] + of[2] + of[3]; }
  // Non-zeros gained: grows less drops.
  int64_t gained() const {
    return of[static_cast<int>(EventKind::kGrow)] - of[static_cast<int>(EventKind::kDrop)];
  }
  EventCounts& operator+=(const EventCounts& other);
  bool operator==(const EventCounts&) const = default;
};

// One changed element: bits before and after, in the low bits of the words.
struct Edit {
  uint32_t position;  // in the segment
  uint32_t old_bits, new_bits;

  bool operator==(const Edit&) const = default;
};

// Elements of a row, of the tensor's rows, as mixed modes see them: a vector is one row, and so is what is
// left of a row that is longer than the segment.
constexpr int64_t RowWidth(int64_t row_elements, int64_t segment_elements) {
  return row_elements > 1 ? std::min(row_elements, segment_elements) : segment_elements;
}

struct EncodeOptions {
  int zstd_level = 3;
  // Modes to try, a bit for each; for tests that want a certain one. The smallest wins on the first
  // kTrialEvents events.
  uint8_t modes = (1 << kModes) - 1;
  // Elements of a row of the tensor, as TensorInfo has them; columns are what mixed modes predict by.
  int64_t row_elements = 1;
  // Leave out how many events each list has: whoever decodes it knows.
  bool counts_are_known = false;
};
inline constexpr int64_t kTrialEvents = 1 << 15;

// `count` elements at most kSegmentElements. An empty record when nothing differs.
absl::StatusOr<std::string> EncodeSegment(ElementKind kind, const void* old_elements,
                                          const void* new_elements, int64_t count,
                                          EventCounts& counts, const EncodeOptions& options = {});

// What a record does not say itself.
struct RecordForm {
  uint16_t format_version = kFormatVersion;  // of the file
  int64_t row_elements = 1;                  // as in EncodeOptions
  // How many events each list has, where the record does not tell it.
  std::optional<EventCounts> counts{};
};

// Appends the edits, ascending by position, and adds to `counts`.
absl::Status DecodeSegment(ElementKind kind, const PackedSegment& base, absl::string_view record,
                           const RecordForm& form, std::vector<Edit>& edits, EventCounts& counts);

// The modes of a record's lists, −1 for an empty list; for `show` and benches.
absl::Status ReadModes(absl::string_view record, const RecordForm& form, int modes[kEventKinds]);

}  // namespace espalier::updates
