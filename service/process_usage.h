// process_usage.h — what this process takes from its machine, as /proc tells it.
#pragma once

#include <cstdint>
#include <optional>

namespace espalier::service {

struct ProcessUsage {
  int64_t resident_bytes = 0, virtual_bytes = 0;
  double cpu_seconds = 0;
  double start_seconds = 0;  // since the epoch
  int64_t threads = 0;
  int64_t open_files = 0, max_files = 0;  // max 0: no limit
};

// Nothing where /proc is not mounted.
std::optional<ProcessUsage> ReadProcessUsage();

struct HostUsage {
  int64_t memory_total_bytes = 0, memory_available_bytes = 0;
  uint64_t busy_ticks = 0, all_ticks = 0;  // of all CPUs since boot
};

std::optional<HostUsage> ReadHostUsage();

}  // namespace espalier::service
