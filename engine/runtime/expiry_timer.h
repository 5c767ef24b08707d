// expiry_timer.h — one thread that wakes sleepers' owners at a moment: queues whose oldest deadline has
// come.
//
// An entry is a callback that is called some time after the moment for which it was armed (about
// 0.1 ms on an idle machine) and answers when it wants to be called next. A queue arms its entry only
// when a request comes whose deadline lies before the moment already armed, so the mutex here is not on
// the way of most requests. A callback should be short: it holds up the others.
//
// Threads  All functions from any thread. Arm may be called with locks held that the callback takes.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

#include "absl/base/thread_annotations.h"

namespace espalier::runtime {

class ExpiryTimer {
 public:
  static constexpr int64_t kNever = INT64_MAX;
  // Takes the time (of NowNanos) and returns the next moment, or kNever.
  using Callback = std::function<int64_t(int64_t now_nanos)>;

  // The one of the process; its thread starts with the first use and ends with the process.
  static ExpiryTimer& OfProcess();

  int64_t Add(Callback callback);
  // Waits for a call of the entry's callback that is running; must not be called from one.
  void Remove(int64_t id);
  // Calls the entry at `nanos`, or earlier if it is armed for an earlier moment.
  void Arm(int64_t id, int64_t nanos);

 private:
  struct Entry {
    Callback callback;
    int64_t due_nanos = kNever;
  };

  ExpiryTimer() = default;
  void Loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable called_;  // a callback has returned
  std::map<int64_t, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  int64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  int64_t running_ ABSL_GUARDED_BY(mutex_) = 0;  // id, 0: none
  int64_t sleeps_until_ ABSL_GUARDED_BY(mutex_) = kNever;
};

}  // namespace espalier::runtime
