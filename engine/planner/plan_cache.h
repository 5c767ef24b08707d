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
// is ignored with one log line, and rebuilt. Writing is temporary file, fsync, rename; a directory
// that cannot be written costs one log line and no more.
#pragma once

#include <string>

#include "engine/planner/cost_table.h"
#include "engine/tensor/device.h"

namespace espalier::planner {

class PlanCache {
 public:
  // `directory` empty: nothing is read or written. It is created when missing.
  PlanCache(std::string directory, const Device& device);

  // The name of the problem that a weight with this pattern poses on this device to this build.
  std::string KeyOf(const std::string& pattern_digest) const;

  // Fills measured costs and resident bytes of the table's options from the file, where there is a
  // good one. Returns whether it found any.
  bool Load(const std::string& key, CostTable& table) const;

  // Writes what the table has measured, and keeps what the file knows of other token counts.
  void Store(const std::string& key, const CostTable& table) const;

 private:
  const std::string directory_;
  const std::string identity_;  // device, threads, build
};

}  // namespace espalier::planner
