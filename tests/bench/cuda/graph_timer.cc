#include "tests/bench/cuda/graph_timer.h"

#include <algorithm>
#include <chrono>

#include "tests/kernels/cuda/device_memory.h"

namespace espalier::bench {

using kernels::testing::OrDie;

TimedGraph::TimedGraph(const kernels::cuda::CudaModule* module, void* stream, int repeats,
                       const Enqueue& enqueue, const std::string& what)
    : module_(module), stream_(stream), repeats_(repeats) {
  OrDie(module->begin_capture(stream), what.c_str());
  for (int i = 0; i < repeats; ++i) OrDie(enqueue(stream, i), what.c_str());
  OrDie(module->end_capture(stream, &graph_), what.c_str());
}

TimedGraph::~TimedGraph() { OrDie(module_->destroy_graph(graph_), "destroy graph"); }

double TimedGraph::Replay(void* begin, void* end) const {
  OrDie(module_->record_event(begin, stream_), "record");
  OrDie(module_->launch_graph(graph_, stream_), "launch graph");
  OrDie(module_->record_event(end, stream_), "record");
  OrDie(module_->synchronize_event(end), "replay");
  float micros = 0;
  OrDie(module_->elapsed_micros(begin, end, &micros), "elapsed");
  return micros / repeats_;
}

std::vector<Timing> TimeInTurn(const kernels::cuda::CudaModule* module,
                               const std::vector<const TimedGraph*>& graphs, int least,
                               double seconds) {
  void *begin = nullptr, *end = nullptr;
  OrDie(module->create_event(&begin), "event");
  OrDie(module->create_event(&end), "event");
  std::vector<std::vector<double>> samples(graphs.size());
  for (const TimedGraph* graph : graphs) graph->Replay(begin, end);
  const auto started = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  };
  for (int round = 0; round < least || (elapsed() < seconds && round < 100); ++round) {
    for (size_t i = 0; i < graphs.size(); ++i) {
      const size_t g = round % 2 == 0 ? i : graphs.size() - 1 - i;
      samples[g].push_back(graphs[g]->Replay(begin, end));
    }
  }
  OrDie(module->destroy_event(begin), "event");
  OrDie(module->destroy_event(end), "event");
  std::vector<Timing> timings;
  for (std::vector<double>& s : samples) {
    std::sort(s.begin(), s.end());
    const auto at = [&](double q) {
      return s[static_cast<size_t>(q * static_cast<double>(s.size() - 1) + 0.5)];
    };
    timings.push_back(
        {at(0.5), s.front(), (at(0.75) - at(0.25)) / at(0.5), static_cast<int>(s.size())});
  }
  return timings;
}

}  // namespace espalier::bench
