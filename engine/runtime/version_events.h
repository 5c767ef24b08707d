// version_events.h — changes of versions' states, kept for a while so that watchers who come late, or
// again, miss none: the newest 1,024, each with a serial of its own.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "engine/updates/update_state.h"

namespace espalier::runtime {

// One change of a version's state, as watchers see it.
struct VersionEvent {
  int64_t serial = 0;  // rises by one
  int64_t seconds = 0;
  std::string model;
  int64_t version = 0;
  updates::UpdateState state = updates::UpdateState::kReceiving;
  std::string reason;
};

// Thread-safe.
class VersionEvents {
 public:
  static constexpr size_t kKept = 1024;

  void Add(VersionEvent event);  // gets its serial here
  // See UpdateManager::EventsAfter.
  absl::StatusOr<std::vector<VersionEvent>> After(int64_t serial, absl::string_view model,
                                                  absl::Time until) const;
  // Ends waits, now and later.
  void Stop();

 private:
  std::vector<VersionEvent> AfterLocked(int64_t serial, absl::string_view model) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<VersionEvent> events_ ABSL_GUARDED_BY(mutex_);
  int64_t serial_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace espalier::runtime
