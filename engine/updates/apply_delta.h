// apply_delta.h — a checkpoint and an .espd into the next checkpoint, byte for byte.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/updates/checkpoint.h"
#include "engine/updates/delta_file.h"

namespace espalier::updates {

struct ApplyOptions {
  int threads = 1;
  std::function<void(uint64_t done_bytes, uint64_t total_bytes)> progress;
};

// Writes the target to `out`, a file or, when the target has several files, a folder; nothing may be
// there yet. It appears when it is complete and its bytes have the digest that the manifest promises,
// or not at all. The caller has checked signatures, if it wants any.
// FailedPrecondition for another base; AlreadyExists; InvalidArgument for a damaged delta.
absl::Status ApplyDelta(const Checkpoint& base, const DeltaFile& delta, const std::string& out,
                        const ApplyOptions& options = {});

// Applies `deltas`, paths in order, to `base`, through folders beside `out`, and encodes the way from
// `base` to the end as one delta: its effect is theirs. Versions, sequence and times come from the
// first and the last of them, the earliest expiry counts; signatures are not carried over. AlreadyExists
// when there is something at `out`.
struct CreateOptions;
absl::StatusOr<Manifest> ComposeDeltas(const std::string& base,
                                       const std::vector<std::string>& deltas,
                                       const std::string& out, CreateOptions options);

}  // namespace espalier::updates
