// arrival_gap.h — the mean time between the requests of late, for deciding whether they come so thickly
// that merging them pays.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace espalier::runtime {

class ArrivalGap {
 public:
  // An arrival; returns the mean. Threads may overwrite each other's step: it is an estimate.
  int64_t Note(int64_t now_nanos) {
    const int64_t last = last_nanos_.exchange(now_nanos, std::memory_order_relaxed);
    const int64_t gap = std::clamp<int64_t>(now_nanos - last, 0, kLongestNanos);
    const int64_t mean = mean_nanos_.load(std::memory_order_relaxed);
    const int64_t moved = mean + (gap - mean) / kWindow;
    mean_nanos_.store(moved, std::memory_order_relaxed);
    return moved;
  }

 private:
  static constexpr int64_t kWindow = 16;  // arrivals
  // After a pause the first burst must not take long to be seen.
  static constexpr int64_t kLongestNanos = 1'000'000;

  std::atomic<int64_t> last_nanos_{0};
  std::atomic<int64_t> mean_nanos_{kLongestNanos};
};

}  // namespace espalier::runtime
