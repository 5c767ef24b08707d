#include "clients/cli/bench_server.h"

namespace espalier::cli {

ServerCounters ServerCounters::Since(const ServerCounters& before) const {
  ServerCounters delta = *this;
  for (auto member :
       {&ServerCounters::inferences, &ServerCounters::executions, &ServerCounters::successes,
        &ServerCounters::failures, &ServerCounters::request_nanos, &ServerCounters::queue_nanos,
        &ServerCounters::input_nanos, &ServerCounters::infer_nanos,
        &ServerCounters::output_nanos}) {
    delta.*member -= before.*member;
  }
  for (const auto& [batch, count] : before.executions_by_batch) {
    if ((delta.executions_by_batch[batch] -= count) == 0) delta.executions_by_batch.erase(batch);
  }
  return delta;
}

double ServerCounters::mean_batch() const {
  return executions == 0 ? 0 : static_cast<double>(inferences) / static_cast<double>(executions);
}

double ServerCounters::MicrosEach(uint64_t nanos) const {
  return successes == 0 ? 0 : static_cast<double>(nanos) / static_cast<double>(successes) / 1e3;
}

std::optional<ServerCounters> ReadServerCounters(client::Client& client, const std::string& model,
                                                 const std::string& version) {
  const auto statistics = client.ModelStatistics(model, version);
  if (!statistics.ok()) return std::nullopt;
  ServerCounters sum;
  for (const inference::ModelStatistics& each : statistics->model_stats()) {
    sum.inferences += each.inference_count();
    sum.executions += each.execution_count();
    const inference::InferStatistics& times = each.inference_stats();
    sum.successes += times.success().count();
    sum.failures += times.fail().count();
    sum.request_nanos += times.success().ns();
    sum.queue_nanos += times.queue().ns();
    sum.input_nanos += times.compute_input().ns();
    sum.infer_nanos += times.compute_infer().ns();
    sum.output_nanos += times.compute_output().ns();
    for (const inference::InferBatchStatistics& batch : each.batch_stats()) {
      sum.executions_by_batch[batch.batch_size()] += batch.compute_infer().count();
    }
  }
  return sum;
}

}  // namespace espalier::cli
