// load.h — drives a server with requests and measures what it answers.
//
//   closed loop   `concurrency` requests are in flight all the time: an answer sends the next one.
//   open loop     requests are due at `rate` per second, at random (Poisson) times that the server's
//                 speed does not change; latency counts from the moment a request was DUE, so that
//                 a stall of server or client shows in every request that it delayed.
//
//   start ──warm-up──▶ measure_begins ──duration──▶ measure_ends ──drain──▶ result
//
// A request belongs to the measurement when it was due in it, however late it is answered. The
// ledger covers the warm-up too.
//
// Threads  `threads` of them send and receive (closed loop) or only receive (open loop, where one
//          more sends); the caller's waits. Nothing is shared between them but counters.
// Errors   Unavailable when nobody listens; a stream that breaks ends the run with its status.
//          Requests that fail are not errors but results.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "clients/bench/hdr_histogram.h"
#include "clients/bench/request_source.h"

namespace espalier::bench {

struct LoadOptions {
  std::string url;
  int concurrency = 1;  // closed loop, unless there is a rate
  double rate = 0;      // requests per second
  double warmup_seconds = 1, duration_seconds = 10;
  double timeout_seconds = 60;  // of each request; on a stream, of those left at the end
  int channels = 1;             // connections
  int threads = 1;
  bool streaming = false;  // ModelStreamInfer, a stream per connection
  // Open loop: more than these are not let into flight; what is due then is counted as withheld.
  int64_t max_outstanding = 10000;
  uint64_t seed = 1;  // of the times in the open loop
  std::function<void()> measure_begins, measure_ends;
};

// Each request that was sent is answered once, with its own id: sent == answered, and the rest 0.
struct Ledger {
  uint64_t sent = 0;
  uint64_t answered = 0;    // well or not
  uint64_t unanswered = 0;  // lost: neither an answer nor an error until the time-out
  uint64_t unasked = 0;     // answers with the id of no request in flight: doubled or mixed up
  uint64_t without_id = 0;  // answers that carry none or cannot be read
  bool Balances() const {
    return sent == answered && unanswered == 0 && unasked == 0 && without_id == 0;
  }
};

struct ErrorCount {
  uint64_t count = 0;
  std::string example;  // the first one's message
};

struct LoadResult {
  double seconds = 0;       // measured
  double client_cpus = 0;   // that the client used meanwhile: near `threads` it was the bottleneck
  HdrHistogram latency;     // of good answers, nanoseconds since the request was due
  HdrHistogram since_sent;  // the same since it was sent
  HdrHistogram failure;     // of bad answers, since it was due
  HdrHistogram send_delay;  // from due to sent: how well the client kept up
  std::map<int, ErrorCount> errors;  // by gRPC code
  uint64_t withheld = 0;
  Ledger ledger;

  uint64_t answered() const { return latency.count() + failure.count(); }
  double throughput() const { return static_cast<double>(latency.count()) / seconds; }
};

absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options, const RequestSource& source);

}  // namespace espalier::bench
