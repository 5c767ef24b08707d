#include "engine/runtime/statistics.h"

#include <algorithm>

namespace espalier::runtime {
namespace {

constexpr int64_t kMicro = 1000, kMilli = 1000 * kMicro, kSecond = 1000 * kMilli;
constexpr std::array<int64_t, LatencyHistogram::kBuckets - 1> kBounds = {
    10 * kMicro,  20 * kMicro, 50 * kMicro, 100 * kMicro, 200 * kMicro, 500 * kMicro, 1 * kMilli,
    2 * kMilli,   5 * kMilli,  10 * kMilli, 20 * kMilli,  50 * kMilli,  100 * kMilli, 200 * kMilli,
    500 * kMilli, 1 * kSecond, 2 * kSecond, 5 * kSecond,  10 * kSecond};

int64_t EpochMillis() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

absl::Span<const int64_t> LatencyHistogram::Bounds() { return kBounds; }

void LatencyHistogram::Observe(int64_t duration_nanos) {
  const auto bucket =
      std::lower_bound(kBounds.begin(), kBounds.end(), duration_nanos) - kBounds.begin();
  buckets_[bucket].fetch_add(1, std::memory_order_relaxed);
  nanos_.fetch_add(static_cast<uint64_t>(std::max<int64_t>(duration_nanos, 0)),
                   std::memory_order_relaxed);
}

LatencyHistogram::Snapshot LatencyHistogram::Read() const {
  Snapshot snapshot;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    snapshot.buckets[i] = buckets_[i].load(std::memory_order_relaxed);
    snapshot.count += snapshot.buckets[i];
  }
  snapshot.nanos = nanos_.load(std::memory_order_relaxed);
  return snapshot;
}

VersionStatistics::VersionStatistics(int64_t max_batch_size)
    : batch_sizes_(static_cast<size_t>(std::max<int64_t>(max_batch_size, 1)) + 1),
      by_batch_size_(std::make_unique<Execution[]>(batch_sizes_)) {}

FailureReason ReasonOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
      return FailureReason::kInvalid;
    case absl::StatusCode::kUnavailable:
      return FailureReason::kUnavailable;
    case absl::StatusCode::kDeadlineExceeded:
      return FailureReason::kDeadline;
    case absl::StatusCode::kCancelled:
      return FailureReason::kCancelled;
    default:
      return FailureReason::kOther;
  }
}

void VersionStatistics::RecordSuccess(int64_t total_nanos, int64_t items,
                                      const PhaseNanos& request_phases) {
  by_code[0].fetch_add(1, std::memory_order_relaxed);
  success.Add(total_nanos);
  inferences.fetch_add(static_cast<uint64_t>(items), std::memory_order_relaxed);
  for (int i = 0; i < kPhases; ++i) phases[i].Add(request_phases[i]);
  last_inference_millis.store(EpochMillis(), std::memory_order_relaxed);
}

void VersionStatistics::RecordFailure(absl::StatusCode code, FailureReason reason,
                                      int64_t total_nanos) {
  const int index = static_cast<int>(code);
  by_code[index >= 0 && index < kCodes ? index : static_cast<int>(absl::StatusCode::kUnknown)]
      .fetch_add(1, std::memory_order_relaxed);
  by_reason[static_cast<int>(reason)].fetch_add(1, std::memory_order_relaxed);
  failure.Add(total_nanos);
}

void VersionStatistics::RecordExecution(int64_t items, const PhaseNanos& execution_phases) {
  executions.fetch_add(1, std::memory_order_relaxed);
  Execution& entry =
      by_batch_size_[std::clamp<size_t>(static_cast<size_t>(items), 0, batch_sizes_ - 1)];
  const auto nanos = [&](Phase phase) {
    return static_cast<uint64_t>(execution_phases[static_cast<int>(phase)]);
  };
  entry.count.fetch_add(1, std::memory_order_relaxed);
  entry.input_nanos.fetch_add(nanos(Phase::kComputeInput), std::memory_order_relaxed);
  entry.infer_nanos.fetch_add(nanos(Phase::kComputeInfer), std::memory_order_relaxed);
  entry.output_nanos.fetch_add(nanos(Phase::kComputeOutput), std::memory_order_relaxed);
}

}  // namespace espalier::runtime
