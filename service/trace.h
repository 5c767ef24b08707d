// trace.h — what happened when to single requests, for a file that Triton's trace tools read.
//
//   TraceSetting ──▶ Update        request ──▶ Sample ── … ──▶ Record ──▶ queue ──▶ writer ──▶ file
//
// Settings as Triton has them, for all models and, on top, for single ones: trace_level (OFF or
// TIMESTAMPS), trace_rate (one request of so many), trace_count (so many traces are left, −1: no
// end), log_frequency (0: one file; N: <trace_file>.0, .1, … of N traces each; after kMaxFiles of
// them the oldest are written anew, so that clients cannot fill a disk with files). trace_file and
// trace_mode are shown only: where the server writes is decided by whoever starts it.
//
// Files    A file is a JSON array that is complete after every write: per trace {"id",
//          "model_name", …} and {"id", "timestamps": [{"name", "ns"}, …]}, on the monotonic clock.
// Threads  All functions from any thread. Writing is done by a thread of the tracer's own; at most
//          kMaxQueued traces wait for it, more are dropped and counted. While nothing is traced a
//          request costs one relaxed load.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace espalier::service {

struct TraceStamp {
  const char* name;
  int64_t nanos;
};

struct TraceRecord {
  uint64_t id = 0;  // as Sample gave it
  std::string model;
  int64_t version = 0;
  std::string request_id;
  std::string code;  // of the answer, "OK"
  std::vector<TraceStamp> stamps;
};

class Tracer {
 public:
  static constexpr size_t kMaxQueued = 4096;
  static constexpr int64_t kMaxFiles = 1000;
  // Values by setting, as TraceSetting carries them. No values: back to the default, or to the
  // setting for all models.
  using Settings = std::map<std::string, std::vector<std::string>>;

  // `file` empty: nothing can be traced.
  explicit Tracer(std::string file);
  ~Tracer() { Finish(); }
  bool allowed() const { return !file_.empty(); }

  // Applies all of `updates`, or none and says what is wrong: InvalidArgument for a name or value,
  // Unimplemented for what cannot be set. For all models when `model` is empty.
  absl::Status Update(absl::string_view model, const Settings& updates);
  // What holds for a model, or for all that have no settings of their own.
  Settings Get(absl::string_view model) const;

  // The number of the trace if this request for `model` is to be traced; 0 if not.
  uint64_t Sample(absl::string_view model) {
    return active_.load(std::memory_order_relaxed) ? SampleActive(model) : 0;
  }
  void Record(TraceRecord record);

  // Writes what is queued, and nothing that is recorded later.
  void Finish();

  uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  // What is set of one scope, all models or a single one, and what is counted for it.
  struct Scope {
    std::optional<bool> timestamps;
    std::optional<int64_t> rate, count, log_frequency;
    uint64_t seen = 0;
    int64_t left = -1;  // of `count`; below 0: no end
  };
  struct Written {
    std::string scope;
    int64_t log_frequency = 0;
    std::string json;
  };

  absl::Status Apply(const std::string& name, const std::vector<std::string>& values,
                     Scope& scope) const;
  const Scope& ScopeOf(absl::string_view model) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  template <typename T>
  T Effective(const Scope& scope, std::optional<T> Scope::*setting, T otherwise) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t SampleActive(absl::string_view model);
  bool AnyActiveLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteLoop();
  // On the writer's thread.
  void Write(Written trace);
  void WriteNumbered(std::vector<std::string>& traces);
  void Append(const std::string& json);

  const std::string file_;
  std::atomic<bool> active_{false};
  std::atomic<uint64_t> dropped_{0};
  mutable std::mutex mutex_;
  Scope all_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Scope, std::less<>> models_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  std::condition_variable queued_;
  std::deque<Written> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // Of the writer's thread.
  std::map<std::string, std::vector<std::string>> batches_;  // by scope, until they are a file
  int64_t next_index_ = 0;
  int64_t end_ = 0;  // of the last trace in `file_`; 0: not begun
  std::thread writer_;
};

}  // namespace espalier::service
