#include "engine/planner/prepared_model.h"

#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "engine/graph/executor.h"
#include "engine/graph/lower.h"
#include "engine/planner/cuda_model.h"
#include "engine/planner/model_planner.h"

namespace espalier::planner {
namespace {

class State final : public ExecutionState {
 public:
  explicit State(std::unique_ptr<graph::ExecutorState> state) : state_(std::move(state)) {}
  void* input(int i) override { return state_->input(i); }
  const void* output(int i) const override { return state_->output(i); }
  size_t arena_bytes() const override { return state_->bytes(); }
  graph::ExecutorState& state() { return *state_; }

 private:
  std::unique_ptr<graph::ExecutorState> state_;
};

class Model final : public PreparedModel {
 public:
  explicit Model(graph::Program program) : program_(std::move(program)) {}

  absl::Status Plan(const Device& device, const PrepareOptions& options) {
    auto planned = PlanModel(program_, device, options);
    if (!planned.ok()) return planned.status();
    plan_ = std::move(planned->plan);
    weights_ = std::move(planned->weights);
    bytes_ = CountWeights(program_, plan_);
    executor_.emplace(program_, device, std::move(planned->buckets), std::move(planned->bindings));
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
  std::optional<graph::Executor> executor_;
};

}  // namespace

WeightBytes CountWeights(const graph::Program& program, const ModelPlan& plan) {
  WeightBytes bytes = {plan.weight_bytes, plan.dense_bytes};
  absl::flat_hash_set<std::string> weights;
  for (const graph::Weight& weight : program.weights) weights.insert(weight.name);
  for (const graph::Value& value : program.values) {
    if (value.constant == nullptr) continue;
    bytes.resident += value.constant->bytes();
    // As dense tensors, a table that is also a layer's weight would be there once.
    if (!weights.contains(value.name)) bytes.dense += value.constant->bytes();
  }
  return bytes;
}

absl::StatusOr<std::unique_ptr<PreparedModel>> PreparedModel::Prepare(
    formats::ModelGraph graph, const Device& device, const PrepareOptions& options) {
  if (options.max_batch_size < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_batch_size is ", options.max_batch_size, ", expected >= 0"));
  }
  auto program = graph::Lower(std::move(graph), {.max_batch_size = options.max_batch_size});
  if (!program.ok()) return program.status();
  if (const CudaDevice* gpu = device.AsCudaOrNull(); gpu != nullptr) {
    return PrepareOnCuda(*std::move(program), *gpu, options);
  }
  auto model = std::make_unique<Model>(*std::move(program));
  if (absl::Status status = model->Plan(device, options); !status.ok()) return status;
  return model;
}

}  // namespace espalier::planner
