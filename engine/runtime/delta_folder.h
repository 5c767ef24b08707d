// delta_folder.h — deltas in a folder of the repository, <model>/deltas/*.espd, as they come in.
//
// A file counts when it looks the same at two looks, so that a copy under way is left alone; hidden
// ones, as tools write them first, are never looked at. It is taken up once, whatever becomes of it,
// until it changes. The folder is only ever read.
// Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/updates/manifest.h"
#include "engine/updates/sha256.h"

namespace espalier::runtime {

class DeltaFolder {
 public:
  struct File {
    std::string name, path;
    absl::Status status;  // not OK: it is no delta
    updates::Digest digest{};
    uint64_t bytes = 0;
    int64_t sequence = 0, target = 0;
    updates::Digest target_weights{};
  };

  // Those to take up, ascending by sequence; `state` says what they were judged by. A folder that is
  // not there is empty.
  absl::StatusOr<std::vector<File>> Look(const std::string& folder, int64_t state);
  // It is not to come up again.
  void Settle(const std::string& name);
  // It is not to come up again in this state.
  void Wait(const std::string& name, int64_t state);
  // True for the first time: what is wrong with it is told once.
  bool Note(const std::string& name);

 private:
  struct Seen {
    std::string identity;  // size, time, inode
    bool still = false, settled = false, noted = false, there = false;
    int64_t waits = -1;  // in this state
    File file;           // when it is still
  };
  static File Read(const std::string& folder, const std::string& name);

  std::map<std::string, Seen> seen_;
};

}  // namespace espalier::runtime
