// request_queue.h — the queue between front end threads and the instances of one model version.
//
// First in, first out, bounded. A waiting instance first spins for a moment (see kSpinNanos) and
// then sleeps; pushing to a queue that nobody sleeps on costs no system call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "engine/runtime/infer_request.h"

namespace espalier::runtime {

class RequestQueue {
 public:
  // `max_pending` requests may wait (those being executed do not count); 0: no limit.
  explicit RequestQueue(int64_t max_pending) : max_pending_(max_pending) {}

  // Unavailable "Exceeds maximum queue size" when it is full. Counted under the lock, so that
  // simultaneous pushes cannot overshoot.
  absl::Status Push(InferRequest* request);

  // The oldest request; waits for one. Null once the queue is closed and empty.
  InferRequest* Pop();

  // Waiting and later calls of Pop return null when nothing is left.
  void Close();

  int64_t pending() const { return pending_.load(std::memory_order_relaxed); }

 private:
  // Watches the queue for a moment without the lock.
  void Spin() const;

  const int64_t max_pending_;
  // Standard ones, here and in the other queues of this folder: ThreadSanitizer understands them,
  // but not those of an Abseil that was built without it.
  std::mutex mutex_;
  std::condition_variable arrived_;
  int sleepers_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<InferRequest*> requests_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> closed_{false};
  std::atomic<int64_t> pending_{0};  // requests_.size(), readable without the lock
};

}  // namespace espalier::runtime
