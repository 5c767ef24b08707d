#include "service/process_usage.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace espalier::service {
namespace {

std::string ReadLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Seconds since the epoch at which the machine started.
double BootSeconds() {
  std::ifstream file("/proc/stat");
  std::string key;
  while (file >> key) {
    double value = 0;
    if (key == "btime" && file >> value) return value;
    file.ignore(1 << 20, '\n');
  }
  return 0;
}

int64_t OpenFiles() {
  std::error_code error;
  int64_t count = 0;
  for (std::filesystem::directory_iterator entry("/proc/self/fd", error), end;
       !error && entry != end; entry.increment(error)) {
    ++count;
  }
  return count - 1;  // the directory itself was open
}

}  // namespace

std::optional<ProcessUsage> ReadProcessUsage() {
  const std::string line = ReadLine("/proc/self/stat");
  // The second field, the name, is in parentheses and may contain anything.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));
  std::string skipped;
  const auto skip = [&](int count) {
    for (int i = 0; i < count; ++i) fields >> skipped;
  };
  const double ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  ProcessUsage usage;
  double user = 0, system = 0, start = 0;
  int64_t pages = 0;
  skip(11);  // 3 state … 13 cmajflt; see proc(5)
  fields >> user >> system;
  skip(4);  // 16 cutime … 19 nice
  fields >> usage.threads;
  skip(1);  // 21 itrealvalue
  fields >> start >> usage.virtual_bytes >> pages;
  if (!fields) return std::nullopt;
  usage.cpu_seconds = (user + system) / ticks;
  usage.start_seconds = BootSeconds() + start / ticks;
  usage.resident_bytes = pages * sysconf(_SC_PAGESIZE);
  usage.open_files = OpenFiles();
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    usage.max_files = static_cast<int64_t>(limit.rlim_cur);
  }
  return usage;
}

std::optional<HostUsage> ReadHostUsage() {
  HostUsage usage;
  std::ifstream memory("/proc/meminfo");
  std::string key;
  int64_t kib = 0;
  while (memory >> key >> kib) {
    if (key == "MemTotal:") usage.memory_total_bytes = kib * 1024;
    if (key == "MemAvailable:") usage.memory_available_bytes = kib * 1024;
    memory.ignore(1 << 20, '\n');
  }
  std::istringstream cpu(ReadLine("/proc/stat"));
  cpu >> key;  // "cpu": user nice system idle iowait irq softirq steal, then guest times that are
               // in user already
  uint64_t ticks = 0;
  for (int field = 0; field < 8 && cpu >> ticks; ++field) {
    usage.all_ticks += ticks;
    if (field != 3 && field != 4) usage.busy_ticks += ticks;
  }
  if (usage.memory_total_bytes == 0 || usage.all_ticks == 0) return std::nullopt;
  return usage;
}

}  // namespace espalier::service
