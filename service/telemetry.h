// telemetry.h — what the front end counts, and the limits on what it takes in at once. Relaxed
// atomics only.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "engine/runtime/statistics.h"
#include "service/rpcs.h"

namespace espalier::service {

// Requests that hold memory: from the moment their message is here until their answer has left. 0:
// no limit.
struct InFlightLimits {
  int64_t max_requests = 0;
  int64_t max_bytes = 0;
};

class InFlight {
 public:
  explicit InFlight(InFlightLimits limits) : limits_(limits) {}

  // An overload, without having taken anything, above a limit. One request is always let in,
  // whatever its size: the limit on message size is another one.
  absl::Status Enter(int64_t bytes);
  void Leave(int64_t bytes);

  int64_t requests() const { return requests_.load(std::memory_order_relaxed); }
  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }
  const InFlightLimits& limits() const { return limits_; }
  // How often Enter refused, because of the number of requests and of their bytes.
  const std::atomic<uint64_t>& refused_for_requests() const { return refused_for_requests_; }
  const std::atomic<uint64_t>& refused_for_bytes() const { return refused_for_bytes_; }

 private:
  const InFlightLimits limits_;
  std::atomic<int64_t> requests_{0};
  std::atomic<int64_t> bytes_{0};
  std::atomic<uint64_t> refused_for_requests_{0}, refused_for_bytes_{0};
};

struct RpcCounters {
  std::array<std::atomic<uint64_t>, runtime::VersionStatistics::kCodes> by_code{};
  runtime::LatencyHistogram latency;
};

struct Telemetry {
  explicit Telemetry(InFlightLimits limits) : in_flight(limits) {}

  std::array<RpcCounters, kRpcs> rpcs;
  InFlight in_flight;  // ModelInfer, and the requests of ModelStreamInfer
};

}  // namespace espalier::service
