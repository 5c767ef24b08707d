#include "engine/planner/cuda_model.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/graph/cuda_executor.h"
#include "engine/graph/device_forms.h"
#include "engine/planner/model_planner.h"

namespace espalier::planner {
namespace {

class State final : public ExecutionState {
 public:
  explicit State(std::unique_ptr<graph::CudaExecutorState> state) : state_(std::move(state)) {}
  void* input(int i) override { return state_->input(i); }
  const void* output(int i) const override { return state_->output(i); }
  size_t arena_bytes() const override { return state_->bytes(); }
  graph::CudaExecutorState& state() { return *state_; }

 private:
  std::unique_ptr<graph::CudaExecutorState> state_;
};

class CudaModel final : public PreparedModel {
 public:
  explicit CudaModel(graph::Program program) : program_(std::move(program)) {}

  absl::Status Plan(const CudaDevice& device, const PrepareOptions& options) {
    const DType compute = ComputeType(program_, options.precision);
    graph::PrepareForDevice(program_, compute);
    auto planned = PlanModel(program_, device, options, compute);
    if (!planned.ok()) return planned.status();
    plan_ = std::move(planned->plan);
    weights_ = std::move(planned->weights);
    bytes_ = CountWeights(program_, plan_);
    auto executor = graph::CudaExecutor::Create(program_, device, std::move(planned->buckets),
                                                std::move(planned->bindings));
    if (!executor.ok()) return executor.status();
    executor_ = *std::move(executor);
    return absl::OkStatus();
  }

  const std::vector<formats::ValueInfo>& inputs() const override { return program_.inputs; }
  const std::vector<formats::ValueInfo>& outputs() const override { return program_.outputs; }
  const ModelPlan& plan() const override { return plan_; }
  size_t weight_bytes() const override { return bytes_.resident; }
  size_t dense_weight_bytes() const override { return bytes_.dense; }

  absl::StatusOr<std::unique_ptr<ExecutionState>> NewState() const override {
    auto state = executor_->NewState();
    if (!state.ok()) return state.status();
    return std::make_unique<State>(*std::move(state));
  }

  absl::Status Run(ExecutionState& state, int64_t batch) const override {
    return executor_->Run(static_cast<State&>(state).state(), program_.batched ? batch : 1);
  }

 private:
  graph::Program program_;
  ModelPlan plan_;
  WeightBytes bytes_;
  std::vector<std::shared_ptr<const ResidentWeight>> weights_;
  std::unique_ptr<graph::CudaExecutor> executor_;
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
  auto model = std::make_unique<CudaModel>(std::move(program));
  if (absl::Status status = model->Plan(device, options); !status.ok()) return status;
  return model;
}

}  // namespace espalier::planner
