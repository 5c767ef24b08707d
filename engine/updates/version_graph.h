// version_graph.h — versions as places, journals as the ways between them (in both directions), and
// which of them a store keeps.
//
// A root is a version whose weights can be read whole: one with an anchor, or one of the repository.
// Whatever is let go of, every version that is kept has a way to a root that is kept: an anchor that
// something still hangs on is never deleted.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/updates/store_state.h"

namespace espalier::updates {

bool IsRoot(const VersionRecord& record);

// The shortest way from `from` (first) to a version that is a goal (last); empty when there is none.
std::vector<int64_t> WayTo(const StoreState& state, int64_t from,
                           const std::function<bool(const VersionRecord&)>& goal);

// Takes out of `state` what its files are not there for any more: versions without a way to a root, deltas that wait. The
// active version has one.
void ForgetUnreachable(StoreState& state);

struct Retention {
  int versions = 16;  // that served before, beside the one that the active version replaced
  uint64_t bytes = UINT64_MAX;  // of their journals and deltas
};

struct DoomedFile {
  enum class Kind { kJournal, kAnchor, kDelta } kind;
  int64_t number;
  bool operator==(const DoomedFile&) const = default;
};

// Takes out of `state` what is not to be kept. The files that nothing names any more; to be deleted
// once the new state is durable.
absl::StatusOr<std::vector<DoomedFile>> Trim(StoreState& state, const Retention& retention);

}  // namespace espalier::updates
