#include "engine/runtime/request_queue.h"

#include "absl/strings/str_cat.h"
#include "engine/runtime/overload.h"

namespace espalier::runtime {
namespace {

// Falling asleep and being woken costs 5–10 µs and, on an idle core, the way out of its sleep state
// on top. After a request the next one of a busy client is often that near; longer would burn the
// core that its client needs.
constexpr int64_t kSpinNanos = 20'000;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

absl::Status RequestQueue::Push(InferRequest* request) {
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    const int64_t waiting = static_cast<int64_t>(requests_.size());
    if (max_pending_ > 0 && waiting >= max_pending_) {
      return OverloadError(absl::StrCat("Exceeds maximum queue size: ", waiting,
                                        " requests wait, at most ", max_pending_, " may"));
    }
    requests_.push_back(request);
    pending_.store(waiting + 1, std::memory_order_relaxed);
    wake = sleepers_ > 0;
  }
  if (wake) arrived_.notify_one();
  return absl::OkStatus();
}

void RequestQueue::Spin() const {
  const int64_t until = NowNanos() + kSpinNanos;
  while (pending() == 0 && !closed_.load(std::memory_order_relaxed) && NowNanos() < until) Pause();
}

InferRequest* RequestQueue::Pop() {
  Spin();
  std::unique_lock lock(mutex_);
  while (requests_.empty() && !closed_.load(std::memory_order_relaxed)) {
    ++sleepers_;
    arrived_.wait(lock);
    --sleepers_;
  }
  if (requests_.empty()) return nullptr;
  InferRequest* request = requests_.front();
  requests_.pop_front();
  pending_.store(static_cast<int64_t>(requests_.size()), std::memory_order_relaxed);
  return request;
}

void RequestQueue::Close() {
  const std::lock_guard lock(mutex_);
  closed_.store(true, std::memory_order_relaxed);
  arrived_.notify_all();
}

}  // namespace espalier::runtime
