// stream_registry.h — the streams that are open: how many there may be, and how they end together.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"

namespace espalier::service {

class InferStream;

struct StreamLimits {
  int64_t max_streams = 0;               // 0: no limit
  int64_t max_requests_in_flight = 256;  // per stream, at least 1
};

class StreamRegistry {
 public:
  explicit StreamRegistry(StreamLimits limits) : limits_(limits) {}

  size_t max_requests_in_flight() const {
    return static_cast<size_t>(limits_.max_requests_in_flight);
  }

  // Keeps the stream until Remove, in every case. Unavailable above the limit and once all were
  // ended: then it must end at once.
  absl::Status Add(std::shared_ptr<InferStream> stream);
  void Remove(InferStream* stream);
  int64_t open() const;
  // How often Add refused because of the limit.
  const std::atomic<uint64_t>& refused() const { return refused_; }

  // Ends every stream, and from now on every new one, with `status`, after the answers to what was
  // read from it.
  void EndAll(const absl::Status& status);

 private:
  const StreamLimits limits_;
  std::atomic<uint64_t> refused_{0};
  mutable std::mutex mutex_;
  std::unordered_map<InferStream*, std::shared_ptr<InferStream>> streams_ ABSL_GUARDED_BY(mutex_);
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace espalier::service
