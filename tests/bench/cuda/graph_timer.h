// graph_timer.h — times device work as the server runs it: captured in a graph, replayed, measured with events.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/module.h"

namespace espalier::bench {

struct Timing {
  double median_us = 0;
  double min_us = 0;
  double spread = 0;  // (75th − 25th percentile) / median
  int samples = 0;
};

// `enqueue(stream, i)` is called for i in [0, repeats) while the stream is captured.
class TimedGraph {
 public:
  using Enqueue = std::function<kernels::KernelStatus(void* stream, int i)>;
  // Dies with `what` when the capture fails.
  TimedGraph(const kernels::cuda::CudaModule* module, void* stream, int repeats,
             const Enqueue& enqueue, const std::string& what);
  ~TimedGraph();
  TimedGraph(const TimedGraph&) = delete;
  TimedGraph& operator=(const TimedGraph&) = delete;

  // Microseconds a repeat of one replay.
  double Replay(void* begin, void* end) const;

 private:
  const kernels::cuda::CudaModule* module_;
  void* stream_;
  void* graph_ = nullptr;
  int repeats_;
};

// Replays the graphs forwards and backwards in turn (ABBA), after one warm-up each, until every graph has `least` samples
// and about `seconds` have gone by.
std::vector<Timing> TimeInTurn(const kernels::cuda::CudaModule* module,
                               const std::vector<const TimedGraph*>& graphs, int least,
                               double seconds);

}  // namespace espalier::bench
