#include "tests/bench/timing.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <thread>

#include "hwy/targets.h"

namespace espalier::bench {
namespace {

using Clock = std::chrono::steady_clock;

double MicrosSince(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// Reads and writes more than any last-level cache slice a core can use here.
void SweepCaches() {
  static std::vector<char> sweep(size_t{256} << 20, 1);
  for (size_t i = 0; i < sweep.size(); i += 64) ++sweep[i];
}

double TimeCalls(const std::function<void()>& function, int calls) {
  const auto start = Clock::now();
  for (int i = 0; i < calls; ++i) function();
  return MicrosSince(start) / calls;
}

}  // namespace

Summary Summarize(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const size_t n = samples.size();
  Summary summary;
  summary.min = samples.front();
  summary.median = n % 2 == 1 ? samples[n / 2] : (samples[n / 2 - 1] + samples[n / 2]) / 2;
  summary.spread = (samples[n * 3 / 4] - samples[n / 4]) / summary.median;
  return summary;
}

std::vector<std::vector<double>> TimeInTurn(const std::vector<std::function<void()>>& functions,
                                            const TimingOptions& options) {
  std::vector<int> calls;
  for (const auto& function : functions) {
    function();
    const double once = TimeCalls(function, 1);
    calls.push_back(options.cold ? 1 : std::max(1, static_cast<int>(options.sample_micros / once)));
  }
  std::vector<std::vector<double>> samples(functions.size());
  for (int round = 0; round < options.samples; ++round) {
    for (size_t i = 0; i < functions.size(); ++i) {
      if (options.cold) {
        SweepCaches();
      } else {
        TimeCalls(functions[i], calls[i]);
      }
      samples[i].push_back(TimeCalls(functions[i], calls[i]));
    }
  }
  return samples;
}

std::string DescribeCpu() {
  std::string model = "unknown CPU", line;
  std::ifstream cpuinfo("/proc/cpuinfo");
  while (std::getline(cpuinfo, line)) {
    if (line.rfind("model name", 0) == 0) {
      model = line.substr(line.find(':') + 2);
      break;
    }
  }
  const int64_t targets = hwy::SupportedTargets();
  const char* isa = (targets & HWY_AVX3) != 0   ? "avx512"
                    : (targets & HWY_AVX2) != 0 ? "avx2"
                                                : "scalar";
  return model + ", " + isa + ", " + std::to_string(std::thread::hardware_concurrency()) + " CPUs";
}

std::string Commit() {
  std::string hash;
  if (FILE* pipe = popen("git rev-parse --short HEAD 2>/dev/null", "r")) {
    char text[64] = {};
    if (std::fgets(text, sizeof(text), pipe) != nullptr) hash = text;
    pclose(pipe);
  }
  while (!hash.empty() && hash.back() == '\n') hash.pop_back();
  return hash.empty() ? "unknown" : hash;
}

std::string Today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::strftime(text, sizeof(text), "%Y-%m-%d", std::gmtime(&now));
  return text;
}

}  // namespace espalier::bench
