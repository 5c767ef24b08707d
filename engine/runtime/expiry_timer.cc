#include "engine/runtime/expiry_timer.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "engine/runtime/statistics.h"

namespace espalier::runtime {

ExpiryTimer& ExpiryTimer::OfProcess() {
  // Never destroyed: entries may be removed while the process ends.
  static ExpiryTimer& timer = [&]() -> ExpiryTimer& {
    auto* made = new ExpiryTimer;
    std::thread thread([made] { made->Loop(); });
    pthread_setname_np(thread.native_handle(), "timer");
    thread.detach();
    return *made;
  }();
  return timer;
}

int64_t ExpiryTimer::Add(Callback callback) {
  const std::lock_guard lock(mutex_);
  entries_[next_id_] = {std::move(callback), kNever};
  return next_id_++;
}

void ExpiryTimer::Remove(int64_t id) {
  std::unique_lock lock(mutex_);
  called_.wait(lock, [&] { return running_ != id; });
  entries_.erase(id);
}

void ExpiryTimer::Arm(int64_t id, int64_t nanos) {
  const std::lock_guard lock(mutex_);
  int64_t& due = entries_.at(id).due_nanos;
  due = std::min(due, nanos);
  if (nanos < sleeps_until_) changed_.notify_one();
}

void ExpiryTimer::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    // A handful of queues: looking at all of them is as good as a heap.
    const auto next = std::min_element(
        entries_.begin(), entries_.end(),
        [](const auto& a, const auto& b) { return a.second.due_nanos < b.second.due_nanos; });
    sleeps_until_ = next == entries_.end() ? kNever : next->second.due_nanos;
    if (sleeps_until_ == kNever) {
      changed_.wait(lock);
      continue;
    }
    const int64_t now = NowNanos();
    if (now < sleeps_until_) {
      changed_.wait_for(lock, std::chrono::nanoseconds(sleeps_until_ - now));
      continue;
    }
    Entry& entry = next->second;
    running_ = next->first;
    entry.due_nanos = kNever;  // what is armed from here on is kept
    lock.unlock();
    const int64_t again = entry.callback(now);
    lock.lock();
    entry.due_nanos = std::min(entry.due_nanos, again);
    running_ = 0;
    called_.notify_all();
  }
}

}  // namespace espalier::runtime
