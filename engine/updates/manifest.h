// manifest.h — what a delta is: for which model, from which bytes to which, until when, how much.
//
// The signatures cover it and the body, and it binds both ends by their digests. FORMAT.md has the bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/updates/segment_codec.h"
#include "engine/updates/sha256.h"
#include "engine/updates/tensor_info.h"

namespace espalier::updates {

inline constexpr size_t kMaxModelNameBytes = 256;
inline constexpr uint64_t kMaxManifestBytes = 256 << 20;
inline constexpr uint64_t kMaxRestBytes = uint64_t{1} << 30;

// A tensor that the delta changes.
struct TensorDelta {
  TensorInfo tensor;  // as the base has it
  EventCounts counts;
  bool operator==(const TensorDelta&) const = default;
};

// Of a tensor of one segment: its record leaves out what its counts are.
inline bool TableTellsCounts(const TensorInfo& tensor) {
  return tensor.elements() <= kSegmentElements;
}

struct Manifest {
  std::string model;
  int64_t base_version = 0, target_version = 0;
  int64_t sequence = 0;         // rises with every delta that a publisher makes for a model
  int64_t created_seconds = 0;  // since 1970
  int64_t expires_seconds = 0;  // 0: never
  // Of the logical weights: weight_digest.h. Half of the base's is enough: whatever else has it does not
  // lead to the target's.
  HalfDigest base_weights{};
  Digest target_weights{};
  HalfDigest files{};  // of both ends: every byte of the files or folders, JoinEnds
  // The target has tensors of other names, dtypes or dims than the base: only for files.
  bool schema_changes = false;
  int64_t base_nonzeros = 0, target_nonzeros = 0;
  // Of what is not in tensors: the bytes it has, and takes at the start of the body. 0: as the base.
  uint64_t rest_bytes = 0, rest_frame_bytes = 0;
  uint64_t body_bytes = 0;
  // In format 1. Later the signatures cover the body themselves.
  std::optional<Digest> body;
  std::vector<TensorDelta> tensors;  // ascending by name

  EventCounts counts() const;
  bool operator==(const Manifest&) const = default;
};

// What a manifest says of the files at both ends.
HalfDigest JoinEnds(const Digest& base_files, const Digest& target_files);

// In the newest format.
absl::StatusOr<std::string> SerializeManifest(const Manifest& manifest);
// Every field checked, sizes before memory is reserved; bytes left over are refused.
absl::StatusOr<Manifest> ParseManifest(absl::string_view bytes, uint16_t format_version);

// FailedPrecondition unless it is for this model.
absl::Status CheckModel(const Manifest& manifest, absl::string_view model);

// FailedPrecondition when the delta had expired at `now_seconds`, or was made more than a day after
// it.
absl::Status CheckFresh(const Manifest& manifest, int64_t now_seconds);

}  // namespace espalier::updates
