// update_statistics.h — what is counted of a model's updates.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "engine/updates/refusal.h"

namespace espalier::runtime {

// By model, for metrics.
struct UpdateStatistics {
  std::string model;
  uint64_t staged = 0, activated = 0, rolled_back = 0, quarantined = 0;
  std::vector<std::pair<std::string, uint64_t>> refused;  // by reason, see refusal.h
  uint64_t received_bytes = 0;
  uint64_t edited = 0, rebuilt = 0;  // updates that went into the shadow in place, or anew
  // Weights whose structure drifted, by what the planner made of it.
  uint64_t replans_changed = 0, replans_kept = 0, replans_failed = 0;
  double stage_seconds = 0, commit_seconds = 0;  // sums
  // The part of commits in which a request may have to wait: from the decision to the new version.
  double flip_seconds = 0;
  int64_t version = 0, sequence = 0;
  bool on_probation = false;
};

// Thread-safe.
class UpdateCounts {
 public:
  template <typename Change>
  void Add(Change change) {
    const std::lock_guard lock(mutex_);
    change(counts_);
  }
  void AddRefused(const absl::Status& status) {
    const std::lock_guard lock(mutex_);
    ++refused_[updates::RefusalWord(status)];
  }
  UpdateStatistics Read() const;

 private:
  mutable std::mutex mutex_;
  UpdateStatistics counts_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, uint64_t> refused_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace espalier::runtime
