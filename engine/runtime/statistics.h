// statistics.h — what is counted while serving: relaxed atomics only, so that no request waits for
// another or for a scrape. Readers see each number exactly, and several numbers of one request
// possibly at different moments.
//
// Times are monotonic nanoseconds. A request's life:
//
//   arrival ──queue──▶ batch starts ──input──▶ copied in ──infer──▶ model ran ──output──▶ answered
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace espalier::runtime {

// Monotonic clock, in nanoseconds.
inline int64_t NowNanos() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline double SecondsSince(int64_t began_nanos) {
  return static_cast<double>(NowNanos() - began_nanos) * 1e-9;
}

// One line per phase of a request: enumerator, name in metrics.
#define ESPALIER_PHASES(X)          \
  X(kQueue, "queue")                \
  X(kComputeInput, "compute_input") \
  X(kComputeInfer, "compute_infer") \
  X(kComputeOutput, "compute_output")

enum class Phase : uint8_t {
#define ESPALIER_PHASE_ENUM(name, text) name,
  ESPALIER_PHASES(ESPALIER_PHASE_ENUM)
#undef ESPALIER_PHASE_ENUM
};

inline constexpr const char* kPhaseNames[] = {
#define ESPALIER_PHASE_NAME(name, text) text,
    ESPALIER_PHASES(ESPALIER_PHASE_NAME)
#undef ESPALIER_PHASE_NAME
};
inline constexpr int kPhases = std::size(kPhaseNames);

// Why a request failed: enumerator, name in metrics.
#define ESPALIER_FAILURE_REASONS(X)                                                    \
  X(kQueueFull, "queue_full")    /* its queue was full when it came */                 \
  X(kTimeout, "timeout")         /* it waited longer than its queue's policy allows */ \
  X(kDeadline, "deadline")       /* its gRPC deadline passed before it was executed */ \
  X(kCancelled, "cancelled")     /* the client took it back before it was executed */  \
  X(kInvalid, "invalid")         /* it asks for what the model has not, or wrongly */  \
  X(kUnavailable, "unavailable") /* the version is going away */                       \
  X(kOther, "other")             /* its execution failed, or there was no memory */

enum class FailureReason : uint8_t {
#define ESPALIER_REASON_ENUM(name, text) name,
  ESPALIER_FAILURE_REASONS(ESPALIER_REASON_ENUM)
#undef ESPALIER_REASON_ENUM
};

inline constexpr const char* kFailureReasonNames[] = {
#define ESPALIER_REASON_NAME(name, text) text,
    ESPALIER_FAILURE_REASONS(ESPALIER_REASON_NAME)
#undef ESPALIER_REASON_NAME
};
inline constexpr int kFailureReasons = std::size(kFailureReasonNames);

// The reason that a code alone tells.
FailureReason ReasonOf(absl::StatusCode code);

using PhaseNanos = std::array<int64_t, kPhases>;

// How often something happened and how long it took in all.
struct DurationCounter {
  std::atomic<uint64_t> count{0};
  std::atomic<uint64_t> nanos{0};

  void Add(int64_t duration_nanos, uint64_t times = 1) {
    count.fetch_add(times, std::memory_order_relaxed);
    nanos.fetch_add(static_cast<uint64_t>(duration_nanos), std::memory_order_relaxed);
  }
};

// Durations in fixed buckets, 1-2-5 per decade from 10 µs to 10 s: a bare handoff is about 10 µs,
// and above 10 s the exact value no longer matters to anybody. A bucket counts its own range only,
// one addition per duration; whoever reads it sums up.
class LatencyHistogram {
 public:
  static constexpr int kBuckets = 20;
  // kBuckets - 1 upper bounds, inclusive, in nanoseconds; one more bucket is above the last.
  static absl::Span<const int64_t> Bounds();

  void Observe(int64_t duration_nanos);

  struct Snapshot {
    std::array<uint64_t, kBuckets>
        buckets{};       // not cumulative; buckets[i] ≤ Bounds()[i], the last is +Inf
    uint64_t count = 0;  // sum of the buckets, so the two always agree
    uint64_t nanos = 0;
  };
  Snapshot Read() const;

 private:
  std::array<std::atomic<uint64_t>, kBuckets> buckets_{};
  std::atomic<uint64_t> nanos_{0};
};

// Kept per model name, over all its versions: histogram series do not multiply with every new
// version.
struct ModelLatency {
  LatencyHistogram request;  // arrival to answer, every request that reached the model
  std::array<LatencyHistogram, kPhases> phases;
};

// Kept per version; its series end with it.
class VersionStatistics {
 public:
  static constexpr int kCodes = 17;  // absl::StatusCode and grpc::StatusCode, 0 to 16

  // `max_batch_size` 0: the model does not batch, executions count as batch 1.
  explicit VersionStatistics(int64_t max_batch_size);

  // One answered request, of `items` items.
  void RecordSuccess(int64_t total_nanos, int64_t items, const PhaseNanos& phases);
  void RecordFailure(absl::StatusCode code, FailureReason reason, int64_t total_nanos);
  // One execution; `phases` without kQueue.
  void RecordExecution(int64_t items, const PhaseNanos& phases);

  struct Execution {
    std::atomic<uint64_t> count{0};
    std::atomic<uint64_t> input_nanos{0}, infer_nanos{0}, output_nanos{0};
  };

  std::array<std::atomic<uint64_t>, kCodes> by_code{};             // answered requests
  std::array<std::atomic<uint64_t>, kFailureReasons> by_reason{};  // failed ones, by FailureReason
  DurationCounter success, failure;
  std::array<DurationCounter, kPhases> phases;  // of successful requests
  std::atomic<uint64_t> inferences{0};          // items in successful requests
  std::atomic<uint64_t> executions{0};
  std::atomic<uint64_t> padding_items{0};  // executed without a request, to reach an allowed size
  std::atomic<int64_t> last_inference_millis{0};  // since the epoch
  absl::Span<const Execution> by_batch_size() const {
    return {by_batch_size_.get(), batch_sizes_};
  }  // index: size

 private:
  size_t batch_sizes_;
  std::unique_ptr<Execution[]> by_batch_size_;
};

}  // namespace espalier::runtime
