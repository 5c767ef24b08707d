#include "engine/planner/cuda_model.h"

#include <algorithm>
#include <utility>

#include "engine/graph/cuda_executor.h"
#include "engine/graph/device_forms.h"
#include "engine/planner/device_peak.h"
#include "engine/planner/executor_model.h"
#include "engine/planner/linear_pair_choice.h"

namespace espalier::planner {
namespace {

class CudaModel final : public ExecutorModel<graph::CudaExecutor, graph::CudaExecutorState> {
 public:
  using ExecutorModel::ExecutorModel;

  absl::Status Plan(const CudaDevice& device) {
    const DType compute = ComputeType(program_, options_.precision);
    graph::PrepareForDevice(program_, compute);
    const std::vector<graph::LinearPair> pairs = graph::PairLinears(program_);
    auto planned = PlanModel(program_, device, options_, compute);
    if (!planned.ok()) return planned.status();
    if (!options_.deterministic) {
      absl::Status chosen =
          ChoosePairs(program_, pairs, device, options_.measure_budget_millis > 0, *planned);
      if (!chosen.ok()) return chosen;
    }
    if (options_.measure_peak) peak_ = MeasuredPeak(device, compute);
    element_bytes_ = static_cast<double>(SizeOf(compute));
    Keep(*std::move(planned));
    PlanChanged();
    auto executor =
        graph::CudaExecutor::Create(program_, device, planned_.buckets, planned_.Bindings());
    if (!executor.ok()) return executor.status();
    executor_ = *std::move(executor);
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<PreparedModel>> Clone() const override {
    auto program = graph::CloneOf(program_);
    if (!program.ok()) return program.status();
    auto planned = planned_.Clone();
    if (!planned.ok()) return planned.status();
    auto clone = std::make_unique<CudaModel>(*std::move(program), device_, options_);
    clone->KeepAs(*this, *std::move(planned));
    clone->peak_ = peak_;
    clone->work_ = work_;
    clone->element_bytes_ = element_bytes_;
    auto executor = executor_->Clone(clone->program_, clone->planned_.Bindings());
    if (!executor.ok()) return executor.status();
    clone->executor_ = *std::move(executor);
    return clone;
  }

  DeviceWork device_work() const override {
    DeviceWork work;
    work.peak = peak_;
    const std::vector<graph::TimedRuns> runs = executor_->timed_runs();
    for (size_t b = 0; b < runs.size(); ++b) {
      work.seconds += runs[b].seconds;
      work.flops += runs[b].items * work_.item_flops;
      work.bytes += runs[b].items * work_.item_bytes;
      if (!work_.weight_bytes.empty()) work.bytes += runs[b].runs * work_.weight_bytes[b];
    }
    return work;
  }

 private:
  void* ConstantMemory(int value) const override { return executor_->constant(value); }
  // Some kernels know only when they are launched.
  absl::Status TryOut() const override {
    if (absl::Status status = device_.AsCudaOrNull()->Use(); !status.ok()) return status;
    return executor_->NewState().status();
  }
  void PlanChanged() override {
    work_ = {};
    for (const LayerPlan& layer : planned_.plan.layers) {
      const auto size = static_cast<double>(layer.out) * static_cast<double>(layer.in);
      const double tokens = static_cast<double>(layer.buckets[0].tokens) /
                            static_cast<double>(layer.buckets[0].batch);  // of an item
      work_.item_flops += 2 * (1 - layer.sparsity) * size * tokens;
      work_.item_bytes += tokens * static_cast<double>(layer.out + layer.in) * element_bytes_;
      work_.weight_bytes.resize(layer.buckets.size());
      for (size_t b = 0; b < layer.buckets.size(); ++b)
        work_.weight_bytes[b] += static_cast<double>(layer.buckets[b].chosen.weight_bytes);
    }
  }

  // What the linear layers come to.
  struct Work {
    double item_flops = 0, item_bytes = 0;
    std::vector<double> weight_bytes;  // per bucket; empty without linear layers
  };

  DevicePeak peak_;
  Work work_;
  double element_bytes_ = 0;  // of activations
};

}  // namespace

DType ComputeType(const graph::Program& program, formats::Precision precision) {
  if (precision == formats::Precision::kBFloat16) return DType::kBFloat16;
  if (precision == formats::Precision::kFloat32 || program.weights.empty()) return DType::kFloat32;
  const DType first = program.weights[0].tensor->dtype();
  const bool alike =
      std::all_of(program.weights.begin(), program.weights.end(),
                  [&](const graph::Weight& weight) { return weight.tensor->dtype() == first; });
  return alike && graph::StorageOf(first) != first ? first : DType::kFloat32;
}

absl::StatusOr<std::unique_ptr<PreparedModel>> PrepareOnCuda(graph::Program program,
                                                             const CudaDevice& device,
                                                             const PrepareOptions& options) {
  auto model = std::make_unique<CudaModel>(std::move(program), device, options);
  if (absl::Status status = model->Plan(device); !status.ok()) return status;
  return model;
}

}  // namespace espalier::planner
