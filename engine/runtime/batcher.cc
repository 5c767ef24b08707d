#include "engine/runtime/batcher.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/runtime/expiry_timer.h"
#include "engine/runtime/overload.h"

namespace espalier::runtime {
namespace {

// Falling asleep and being woken costs 5–10 µs and, on an idle core, the way out of its sleep state
// on top. After a request the next one of a busy client is often that near; longer would burn the
// core that its client needs.
constexpr int64_t kSpinNanos = 20'000;

// Patience in shares of the last run: the most that it may add, and what is a pause in a burst of clients
// that come back, which is not less than what lies between two requests that one core brings. A whole run
// instead of a quarter brought no more requests a second (4 layers of 4096, dense and 90 % sparse, 8 and
// 64 clients, 2 cores).
constexpr int64_t kPatienceShare = 4, kQuietShare = 16;
constexpr int64_t kLeastQuietNanos = 50'000;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Whether the time of a client that cancels has all but passed. Its library counts from a moment before
// ours and cancels by itself then, so that its deadline mostly arrives here as a cancellation, early by
// the time that the request was on its way.
bool IsItsDeadline(const InferRequest& request, int64_t now) {
  if (request.deadline_nanos == INT64_MAX) return false;
  constexpr int64_t kOnTheWayNanos = 10'000'000;
  return request.deadline_nanos - now <= kOnTheWayNanos;
}

Refusal TimedOut(const InferRequest& request, int64_t now) {
  return {absl::UnavailableError(
              absl::StrCat("Request timeout expired: waited ", (now - request.arrival_nanos) / 1000,
                           " microseconds, allowed ",
                           (request.queue_deadline_nanos - request.arrival_nanos) / 1000)),
          FailureReason::kTimeout};
}

}  // namespace

Refusal Abandoned(const InferRequest& request, int64_t now) {
  if (now >= request.deadline_nanos || (request.cancelled() && IsItsDeadline(request, now))) {
    return {absl::DeadlineExceededError(
                "deadline passed while the request waited; it was not executed"),
            FailureReason::kDeadline};
  }
  if (request.cancelled()) {
    return {absl::CancelledError("request was cancelled while it waited; it was not executed"),
            FailureReason::kCancelled};
  }
  return {};
}

Batcher::Batcher(const BatchingPolicy& policy, Refuse refuse)
    : policy_(policy), refuse_(std::move(refuse)), waiting_(policy) {
  timer_ = ExpiryTimer::OfProcess().Add([this](int64_t now) { return OnTimer(now); });
}

Batcher::~Batcher() { ExpiryTimer::OfProcess().Remove(timer_); }

Refusal Batcher::Push(InferRequest* request) {
  const int64_t now = NowNanos();
  if (Refusal refusal = Abandoned(*request, now); !refusal.status.ok()) return refusal;
  request->level_ = policy_.level_of(request->priority);
  const QueuePolicy& policy = policy_.policy_of(request->level_);
  if (const int64_t micros = policy.TimeoutMicros(request->timeout_micros); micros > 0)
    request->queue_deadline_nanos = request->arrival_nanos + micros * 1000;

  Refused refused;
  Refusal result;
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    if (!waiting_.HasRoom(request->level_)) ExpireLocked(now, refused);
    if (!waiting_.HasRoom(request->level_)) {
      const int64_t most =
          policy.max_pending > 0 ? policy.max_pending : policy_.max_pending_elsewhere;
      result = {OverloadError(absl::StrCat(
                    "Exceeds maximum queue size: ", most, " requests wait and no more may",
                    request->level_ > 0 ? " at priority level " : "",
                    request->level_ > 0 ? absl::StrCat(request->level_) : "")),
                FailureReason::kQueueFull};
    } else if (!request->Offer(this)) {
      result = Abandoned(*request, now);
    } else {
      waiting_.Add(request);
      last_arrival_nanos_ = now;
      CountPendingLocked();
      wake = WakesLocked();
      if (const int64_t first = waiting_.deadlines().first_nanos(); first < armed_nanos_) {
        armed_nanos_ = first;
        ExpiryTimer::OfProcess().Arm(timer_, first);
      }
    }
  }
  if (wake) arrived_.notify_one();
  Answer(refused);
  return result;
}

bool Batcher::WakesLocked() const {
  if (sleepers_ == 0) return false;
  // An instance that sleeps until the oldest request is due need not hear of each that comes, unless it
  // could complete a batch.
  return timed_sleepers_ == 0 || !policy_.preferred.empty() ||
         waiting_.items() >= policy_.largest_merged() ||
         (policy_.adapts() && waiting_.requests() >= expected_);
}

Patience Batcher::PatienceAfter(const Batch& last) const {
  if (!policy_.adapts() || last.run_nanos == 0) return {};
  const int64_t now = NowNanos();
  return {static_cast<int64_t>(last.requests.size()) + last.waited_meanwhile, now,
          now + last.run_nanos / kPatienceShare,
          std::max(last.run_nanos / kQuietShare, kLeastQuietNanos)};
}

int64_t Batcher::DueLocked(const Patience& patience) const {
  if (!policy_.adapts()) return waiting_.OldestArrival() + policy_.max_delay_nanos;
  if (waiting_.requests() >= patience.expected) return 0;
  return std::min(patience.until_nanos,
                  std::max(last_arrival_nanos_, patience.begun_nanos) + patience.quiet_nanos);
}

void Batcher::Spin() const {
  const int64_t until = NowNanos() + kSpinNanos;
  while (pending() == 0 && !closed_.load(std::memory_order_relaxed) && NowNanos() < until) Pause();
}

bool Batcher::Next(Batch& batch) {
  Refused refused;
  bool wake = false;
  const Patience patience = PatienceAfter(batch);
  batch.requests.clear();
  batch.items = batch.run_nanos = batch.waited_meanwhile = 0;
  Spin();
  {
    std::unique_lock lock(mutex_);
    while (batch.requests.empty()) {
      const int64_t now = NowNanos();
      ExpireLocked(now, refused);
      if (!refused.empty()) {
        lock.unlock();
        Answer(refused);
        lock.lock();
        continue;
      }
      int64_t due = INT64_MAX;
      if (const size_t count = CountLocked(patience, now, &due); count > 0) {
        TakeLocked(count, batch);
        continue;
      }
      if (waiting_.requests() == 0 && closed_.load(std::memory_order_relaxed)) return false;
      ++sleepers_;
      if (due == INT64_MAX) {
        arrived_.wait(lock);
      } else {
        ++timed_sleepers_;
        expected_ = patience.expected;
        arrived_.wait_for(lock, std::chrono::nanoseconds(due - now));
        --timed_sleepers_;
      }
      --sleepers_;
    }
    batch.sequence = closed_batches_++;
    // Another instance looks after the rest: it may be a batch already, and must be one in time.
    wake = waiting_.requests() > 0 && sleepers_ > 0;
  }
  if (wake) arrived_.notify_one();
  return true;
}

size_t Batcher::CountLocked(const Patience& patience, int64_t now, int64_t* due_nanos) {
  if (waiting_.requests() == 0) return 0;
  const int64_t most = policy_.largest_merged();
  if (!policy_.preferred.empty()) {
    if (const size_t count = CountPreferredLocked(); count > 0) return count;
  }
  if (waiting_.items() < most) {
    const int64_t due = DueLocked(patience);
    if (now < due) {
      *due_nanos = due;
      return 0;
    }
  }
  size_t count = 0;
  int64_t sum = 0;
  waiting_.ForEach([&](const InferRequest* request) {
    if (count > 0 && sum + request->batch > most) return false;
    sum += request->batch;
    ++count;
    return true;
  });
  return count;
}

size_t Batcher::CountPreferredLocked() {
  const int64_t most = policy_.largest_merged();
  size_t count = 0, best = 0;
  int64_t sum = 0;
  waiting_.ForEach([&](const InferRequest* request) {
    sum += request->batch;
    ++count;
    if (std::binary_search(policy_.preferred.begin(), policy_.preferred.end(), sum)) best = count;
    return sum < most;
  });
  return best;
}

void Batcher::TakeLocked(size_t count, Batch& batch) {
  waiting_.ForEach([&](InferRequest* request) {
    waiting_.Remove(request);
    // Otherwise a canceller's, which waits for the lock and finds it gone from here.
    if (request->Claim()) {
      batch.requests.push_back(request);
      batch.items += request->batch;
    }
    return --count > 0;
  });
  CountPendingLocked();
}

void Batcher::ExpireLocked(int64_t now, Refused& refused) {
  DeadlineHeap& deadlines = waiting_.deadlines();
  while (deadlines.first_nanos() <= now) {
    InferRequest* request = deadlines.top();
    const bool is_timeout = now < request->deadline_nanos;
    if (is_timeout && policy_.policy_of(request->level_).delays_expired) {
      waiting_.Delay(request);
      continue;
    }
    waiting_.Remove(request);
    if (request->Claim())
      refused.emplace_back(request,
                           is_timeout ? TimedOut(*request, now) : Abandoned(*request, now));
  }
  CountPendingLocked();
}

void Batcher::Answer(Refused& refused) {
  for (auto& [request, refusal] : refused) refuse_(request, std::move(refusal));
  refused.clear();
}

int64_t Batcher::OnTimer(int64_t now) {
  Refused refused;
  int64_t next = INT64_MAX;
  {
    const std::lock_guard lock(mutex_);
    ExpireLocked(now, refused);
    next = armed_nanos_ = waiting_.deadlines().first_nanos();
  }
  Answer(refused);
  return next;
}

void Batcher::TakeBack(InferRequest* request) {
  {
    const std::lock_guard lock(mutex_);
    if (request->queued_) {
      waiting_.Remove(request);
      CountPendingLocked();
    }
  }
  Refusal refusal = Abandoned(*request, NowNanos());
  refuse_(request, std::move(refusal));
}

void Batcher::Close() {
  const std::lock_guard lock(mutex_);
  closed_.store(true, std::memory_order_relaxed);
  arrived_.notify_all();
}

void Batcher::CountPendingLocked() {
  pending_.store(waiting_.requests(), std::memory_order_relaxed);
}

std::vector<Batcher::LevelPending> Batcher::PendingByLevel() const {
  std::vector<LevelPending> pending;
  const std::lock_guard lock(mutex_);
  for (const auto& [number, level] : waiting_.levels()) pending.push_back({number, level.requests});
  return pending;
}

}  // namespace espalier::runtime
