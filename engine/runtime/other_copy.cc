#include "engine/runtime/other_copy.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace espalier::runtime {

void OtherCopy::Keep(VersionHandle version) {
  const std::lock_guard lock(mutex_);
  ready_.swap(version);
}

VersionHandle OtherCopy::Ready(int64_t number) const {
  const std::lock_guard lock(mutex_);
  return ready_ != nullptr && ready_->version() == number ? ready_ : nullptr;
}

VersionHandle OtherCopy::Ready() const {
  const std::lock_guard lock(mutex_);
  return ready_;
}

int64_t OtherCopy::version() const {
  const std::lock_guard lock(mutex_);
  if (ready_ != nullptr) return ready_->version();
  return draining_ != nullptr ? draining_version_ : shadow_.version;
}

absl::StatusOr<Shadow> OtherCopy::Take(absl::Duration patience) {
  VersionHandle dropped;  // outside the lock
  std::unique_lock lock(mutex_);
  if (ready_ != nullptr) {
    dropped = std::move(ready_);
    draining_ = dropped.get();
    draining_version_ = dropped->version();
    lock.unlock();
    dropped.reset();
    lock.lock();
  }
  const int64_t version = draining_version_;
  const bool waited = draining_ != nullptr;
  if (!changed_.wait_for(lock, absl::ToChronoNanoseconds(patience),
                         [this] { return draining_ == nullptr; })) {
    return absl::UnavailableError(absl::StrCat("version ", version,
                                               ", whose memory the update needs, is still held by "
                                               "requests after ",
                                               absl::FormatDuration(patience), ": try again"));
  }
  if (waited && shadow_.model == nullptr)
    return absl::CancelledError("the model was unloaded or loaded anew meanwhile");
  return std::exchange(shadow_, {});
}

bool OtherCopy::Retired(const ServedVersion* version,
                        std::unique_ptr<planner::PreparedModel>& model) {
  const std::lock_guard lock(mutex_);
  if (draining_ != version) return false;
  draining_ = nullptr;
  shadow_ = {std::move(model), draining_version_};
  changed_.notify_all();
  return true;
}

void OtherCopy::Drop() {
  VersionHandle ready;  // outside the lock
  Shadow shadow;
  const std::lock_guard lock(mutex_);
  ready_.swap(ready);
  shadow = std::exchange(shadow_, {});
  draining_ = nullptr;
  changed_.notify_all();
}

}  // namespace espalier::runtime
