// timing.h — how benches measure: samples of two things in turn, so that a noisy neighbour or a clock change hits both.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace espalier::bench {

struct Summary {
  double median = 0;
  double min = 0;
  double spread = 0;  // (75th - 25th percentile) / median
};
Summary Summarize(std::vector<double> samples);

struct TimingOptions {
  int samples = 21;
  // Warm: as many back-to-back calls as fill this time are not timed (a last-level cache that takes
  // what falls out of L2 needs several passes to fill), then as many are; a sample is their mean.
  // What fits into the caches stays there, as in a server that runs the layer again and again.
  double sample_micros = 2000;
  // Cold: before every timed call the caches are swept; a sample is one call.
  bool cold = false;
};

// Samples of each function in turn (round after round), microseconds per call.
std::vector<std::vector<double>> TimeInTurn(const std::vector<std::function<void()>>& functions,
                                            const TimingOptions& options);

// "AMD EPYC 9B14, avx512, 2 CPUs"
std::string DescribeCpu();
// Short hash of HEAD, or "unknown" outside a checkout.
std::string Commit();
std::string Today();

}  // namespace espalier::bench
