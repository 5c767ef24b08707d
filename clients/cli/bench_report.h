// bench_report.h — the results of `espalier bench` for people, programs and HdrHistogram's plotter.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "clients/bench/load.h"
#include "clients/cli/bench_server.h"

namespace espalier::cli {

// One load that was kept for a while.
struct BenchLevel {
  bench::LoadOptions options;
  bench::LoadResult result;
  std::optional<ServerCounters> server;
};

struct BenchReport {
  std::string command, date, commit;  // of the client
  std::string client_version, device;
  std::string url, server_name, server_version;
  std::string model, version, layouts;
  std::string inputs;
  int64_t batch = 1;
  size_t distinct_requests = 0;
  std::vector<BenchLevel> levels;
};

std::string BenchText(const BenchReport& report);
std::string BenchJson(const BenchReport& report);
// The percentile distribution of good answers in microseconds, as hdr_histogram prints it (.hgrm).
std::string BenchHgrm(const BenchLevel& level);

}  // namespace espalier::cli
