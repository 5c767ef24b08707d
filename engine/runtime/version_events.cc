#include "engine/runtime/version_events.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"

namespace espalier::runtime {

void VersionEvents::Add(VersionEvent event) {
  const std::lock_guard lock(mutex_);
  event.serial = ++serial_;
  events_.push_back(std::move(event));
  if (events_.size() > kKept) events_.pop_front();
  changed_.notify_all();
}

std::vector<VersionEvent> VersionEvents::AfterLocked(int64_t serial,
                                                     absl::string_view model) const {
  std::vector<VersionEvent> found;
  for (const VersionEvent& event : events_) {
    if (event.serial > serial && (model.empty() || event.model == model)) found.push_back(event);
  }
  return found;
}

absl::StatusOr<std::vector<VersionEvent>> VersionEvents::After(int64_t serial,
                                                               absl::string_view model,
                                                               absl::Time until) const {
  std::unique_lock lock(mutex_);
  while (true) {
    if (stopped_) return absl::CancelledError("the server is shutting down");
    std::vector<VersionEvent> found = AfterLocked(serial, model);
    const absl::Duration left = until - absl::Now();
    if (!found.empty() || left <= absl::ZeroDuration()) return found;
    // In pieces, so that an infinite time is one.
    changed_.wait_for(lock, absl::ToChronoNanoseconds(std::min(left, absl::Seconds(60))));
  }
}

void VersionEvents::Stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

}  // namespace espalier::runtime
