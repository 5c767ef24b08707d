#include "engine/planner/cuda_stopwatch.h"

#include <algorithm>
#include <utility>

namespace espalier::planner {
namespace {

constexpr int kRepeats = 20;
// There and back; fewer when a replay takes long, for then its own noise is small.
constexpr int kRounds = 5, kRoundsOfLong = 2;
constexpr float kLongMicros = 2000;

}  // namespace

absl::StatusOr<std::unique_ptr<CudaStopwatch>> CudaStopwatch::Make(const CudaDevice& device) {
  std::unique_ptr<CudaStopwatch> stopwatch(new CudaStopwatch(device));
  const auto place = [](absl::StatusOr<CudaHandle> made, CudaHandle& handle) -> absl::Status {
    if (made.ok()) handle = *std::move(made);
    return made.status();
  };
  for (absl::Status status :
       {place(device.NewStream(), stopwatch->stream_), place(device.NewEvent(), stopwatch->begin_),
        place(device.NewEvent(), stopwatch->end_)}) {
    if (!status.ok()) return status;
  }
  stopwatch->context_.stream = stopwatch->stream_.get();
  return stopwatch;
}

absl::StatusOr<CudaHandle> CudaStopwatch::Capture(
    const std::function<absl::Status()>& enqueue) const {
  return device_.Capture(stream_.get(), [&]() -> absl::Status {
    for (int i = 0; i < kRepeats; ++i) {
      if (absl::Status status = enqueue(); !status.ok()) return status;
    }
    return absl::OkStatus();
  });
}

absl::StatusOr<std::vector<double>> CudaStopwatch::Time(
    const std::vector<const CudaHandle*>& graphs) const {
  bool is_long = false;
  for (const CudaHandle* graph : graphs) {
    auto warm_up = Replay(*graph);
    if (!warm_up.ok()) return warm_up.status();
    is_long = is_long || *warm_up > kLongMicros;
  }
  std::vector<std::vector<float>> micros(graphs.size());
  for (int round = 0; round < (is_long ? kRoundsOfLong : kRounds); ++round) {
    for (size_t i = 0; i < 2 * graphs.size(); ++i) {
      const size_t turn = i < graphs.size() ? i : 2 * graphs.size() - 1 - i;
      auto replay = Replay(*graphs[turn]);
      if (!replay.ok()) return replay.status();
      micros[turn].push_back(*replay);
    }
  }
  std::vector<double> medians;
  for (std::vector<float>& all : micros) {
    std::nth_element(all.begin(), all.begin() + all.size() / 2, all.end());
    medians.push_back(std::max<double>(all[all.size() / 2] / kRepeats, 1e-3));
  }
  return medians;
}

absl::Status FillWithNumbers(const CudaDevice& device, const CudaHandle& memory, void* stream) {
  return device.Explain(device.module().fill(memory.get(), 0x3c, memory.bytes(), stream), "fill");
}

absl::StatusOr<float> CudaStopwatch::Replay(const CudaHandle& graph) const {
  const auto& module = device_.module();
  void* stream = stream_.get();
  float micros = 0;
  for (const kernels::KernelStatus& status :
       {module.record_event(begin_.get(), stream), module.launch_graph(graph.get(), stream),
        module.record_event(end_.get(), stream), module.synchronize_event(end_.get()),
        module.elapsed_micros(begin_.get(), end_.get(), &micros)}) {
    if (!status.ok()) return device_.Explain(status, "measure");
  }
  return micros;
}

}  // namespace espalier::planner
