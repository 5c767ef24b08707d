// receive.h — every check between a delta's bytes and a journal that may be applied, in the order
// that spends least on a stranger: signatures, freshness, model, base, then the body.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "engine/updates/delta_file.h"
#include "engine/updates/journal.h"

namespace espalier::updates {

struct ReceivePolicy {
  std::optional<TrustPolicy> trust;  // none: unsigned deltas are accepted
  std::string model;                 // empty: any
  int64_t now_seconds = 0;
  JournalLimits limits;
  int threads = 1;
  WorkerScope worker_scope;  // of those beside the caller's
};

// The journal leads from `base`, whose digest is `base_weights`, to the target that the manifest
// promises; nothing was touched, and what `sink` got is to be believed when this returns OK. The status
// says which check failed, and its code what to do:
// PermissionDenied (not signed as asked), FailedPrecondition (expired, another model or base,
// changed dtypes or dims), InvalidArgument (damaged or malicious), Unimplemented (newer format),
// ResourceExhausted (too large). `blocks`: the base's as DecodeAndDigest takes them; the target's when it returns OK.
absl::Status Receive(const DeltaFile& delta, const TensorReader& base, const Digest& base_weights,
                     const ReceivePolicy& policy, BlockDigests& blocks, JournalSink& sink);

}  // namespace espalier::updates
