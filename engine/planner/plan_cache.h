// plan_cache.h — measured costs of layers on disk, so that a second start does not measure again.
//
// One file per problem (pattern of zeros, shape, dtype, device, threads, build), named by the
// digest of its key; models that share a layer share its file. A line-based text:
//
//   espalier-layer-costs 1
//   key <64 hex>
//   cost <layout> <kernel> <resident bytes> <tokens> <µs>      (any number)
//   end <SHA-256 of everything before this line>
//
// Reading trusts nothing: a file that is too large, of another version, damaged, or for another key
// is ignored, and replaced by the next Store. Writing is temporary file, fsync, rename. Neither stops
// a model from loading; the planner logs one line per model.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/planner/cost_table.h"
#include "engine/tensor/device.h"

namespace espalier::planner {

// In place of a directory: what was measured is kept in memory, for as long as the process lives.
inline constexpr absl::string_view kPlansInMemory = ":memory:";

class PlanCache {
 public:
  // `directory` empty: nothing is read or written. It is created when there is something to store.
  PlanCache(std::string directory, const Device& device);

  // The name of the problem that a weight with this pattern poses on this device to this build.
  std::string KeyOf(const std::string& pattern_digest) const;

  // Fills measured costs and resident bytes of the table's options from the file, where there is a
  // good one. Returns whether it found any; an error says which file is bad, and why.
  absl::StatusOr<bool> Load(const std::string& key, CostTable& table) const;

  // Writes what the table has measured, and keeps what the file knows of other token counts.
  absl::Status Store(const std::string& key, const CostTable& table) const;

 private:
  const std::string directory_;
  const std::string identity_;  // device, threads, build
};

}  // namespace espalier::planner
