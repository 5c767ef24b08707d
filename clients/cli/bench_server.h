// bench_server.h — what the server itself counted during a measurement: differences of two
// ModelStatistics.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "clients/cpp/client.h"

namespace espalier::cli {

// Sums over the versions that were asked for; the counters only grow.
struct ServerCounters {
  uint64_t inferences = 0, executions = 0;
  uint64_t successes = 0, failures = 0;
  // Nanoseconds of all successful requests.
  uint64_t request_nanos = 0, queue_nanos = 0, input_nanos = 0, infer_nanos = 0, output_nanos = 0;
  std::map<uint64_t, uint64_t> executions_by_batch;

  ServerCounters Since(const ServerCounters& before) const;
  double mean_batch() const;
  // Of one request, in microseconds.
  double MicrosEach(uint64_t nanos) const;
};

// Nothing from a server without statistics, which is no reason not to measure it.
std::optional<ServerCounters> ReadServerCounters(client::Client& client, const std::string& model,
                                                 const std::string& version);

}  // namespace espalier::cli
