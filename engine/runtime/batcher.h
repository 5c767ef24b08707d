// batcher.h — the queue between front end threads and the instances of one model version, and the
// merging of what waits in it into batches.
//
//   Push ──admission──▶ PendingRequests ──Next──▶ a closed batch, an instance's
//                            │
//                            └─ deadline, timeout, Cancel ──▶ refused at once, never executed
//
// A batch is closed under the lock, by the instance that will run it, so it cannot grow afterwards. It is
// the longest run of requests, in serving order, that adds up to
//   · the largest preferred size that can be formed, if one can;
//   · else as much as fits, once no more fits or the oldest request has waited max_delay_nanos;
//   · with neither in the config, as much as fits, at once, or (Patience) a moment later.
// What fits is max_batch_size or, where sizes are preferred, the largest of them; only a request alone may
// exceed that. Requests are never cut. All requests of a version have the same types and shapes per item
// (BindRequest refuses others), so any two of them may share a batch, whatever outputs they ask for.
//
// Who owns a waiting request is settled by one atomic of its own (InferRequest::Claim), so that an instance,
// the timer and a canceller can reach for it at the same time, and the loser touches it no more.
//
// Threads  All functions from any thread. A refused request is answered without a lock held, in the thread
//          that found it expired or cancelled it. A waiting instance first spins for a moment (kSpinNanos) and
//          then sleeps; pushing to a queue that nobody sleeps on costs no system call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "engine/runtime/batching_policy.h"
#include "engine/runtime/infer_request.h"
#include "engine/runtime/pending_requests.h"

namespace espalier::runtime {

// Why a request that is not executed is answered with what.
struct Refusal {
  absl::Status status;
  FailureReason reason = FailureReason::kOther;
};

struct Batch {
  absl::InlinedVector<InferRequest*, 4> requests;  // in serving order
  int64_t items = 0;
  uint64_t sequence = 0;  // of closing, from 0
  // Filled by the instance, for the patience of its next Next: how long the model ran, and how many
  // requests waited when it was done, before the first was answered.
  int64_t run_nanos = 0;
  int64_t waited_meanwhile = 0;
};

// How long an instance that comes back from a batch waits for company to what it finds, when the config
// leaves that to the server. Clients that wait for an answer before they ask again come back in a burst
// when a batch is answered, and the first of them alone would make a batch of one. So as many are waited
// for as are known to be there, those just answered and those that waited meanwhile, no longer than they
// keep coming and for a quarter of an execution at most. A lone client is one, and waits for nobody.
struct Patience {
  int64_t expected = 0;     // requests
  int64_t begun_nanos = 0;  // when the last of the batch was answered
  int64_t until_nanos = 0;
  int64_t quiet_nanos = 0;  // without an arrival nobody else is coming
};

// Why a request that nobody waits for any more must not be executed: cancelled, or past its deadline.
// OK if it may.
Refusal Abandoned(const InferRequest& request, int64_t now_nanos);

class Batcher {
 public:
  // Counts and answers a request that the batcher took out of the queue.
  using Refuse = std::function<void(InferRequest*, Refusal)>;

  // `policy` outlives the batcher.
  Batcher(const BatchingPolicy& policy, Refuse refuse);
  // No request waits any more: each holds a pin on the version.
  ~Batcher();

  // Queues a request whose batch is at most policy.largest_request(), and sets its queue deadline. What
  // comes back with a bad status is still the caller's: kQueueFull when its level is full (counted
  // under the lock, so that simultaneous pushes cannot overshoot), kCancelled, kDeadline.
  Refusal Push(InferRequest* request);

  // Waits for a batch and closes it; `batch`, this instance's last, is overwritten. False, without one,
  // once the batcher is closed.
  bool Next(Batch& batch);

  // Waiting and later calls of Next return false when nothing is left.
  void Close();

  // Answers a request whose Cancel claimed it. Called by InferRequest::Cancel only.
  void TakeBack(InferRequest* request);

  int64_t pending() const { return pending_.load(std::memory_order_relaxed); }
  // By priority level, from the highest (1); one level 0 for a model without levels.
  struct LevelPending {
    uint64_t level = 0;
    int64_t requests = 0;
  };
  std::vector<LevelPending> PendingByLevel() const;

 private:
  using Refused = std::vector<std::pair<InferRequest*, Refusal>>;

  // Watches the queue for a moment without the lock.
  void Spin() const;
  // Takes what has expired out of the queue, or moves it behind the others.
  void ExpireLocked(int64_t now_nanos, Refused& refused) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Answer(Refused& refused);
  // The timer's callback.
  int64_t OnTimer(int64_t now_nanos);
  Patience PatienceAfter(const Batch& last) const;
  // When what waits is a batch, if no more comes before.
  int64_t DueLocked(const Patience& patience) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // How many requests, from the front, make the batch that may be closed now. 0: none yet, look again
  // when something comes or at *due_nanos.
  size_t CountLocked(const Patience& patience, int64_t now_nanos, int64_t* due_nanos)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The same for requests that are preferred in certain sums; 0: only waiting decides.
  size_t CountPreferredLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeLocked(size_t count, Batch& batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether a request that has come is a reason to wake an instance.
  bool WakesLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountPendingLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const BatchingPolicy& policy_;
  const Refuse refuse_;
  int64_t timer_ = 0;
  // Standard ones, here and in the other classes of this folder: ThreadSanitizer understands them, but
  // not those of an Abseil that was built without it.
  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  PendingRequests waiting_ ABSL_GUARDED_BY(mutex_);
  int sleepers_ ABSL_GUARDED_BY(mutex_) = 0;
  int timed_sleepers_ ABSL_GUARDED_BY(mutex_) = 0;  // of these, those that wake when a batch is due
  int64_t expected_ ABSL_GUARDED_BY(mutex_) = 0;    // of whoever sleeps with patience
  int64_t last_arrival_nanos_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t armed_nanos_ ABSL_GUARDED_BY(mutex_) = INT64_MAX;  // what the timer knows
  uint64_t closed_batches_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<bool> closed_{false};
  std::atomic<int64_t> pending_{0};  // waiting_.requests(), readable without the lock
};

}  // namespace espalier::runtime
