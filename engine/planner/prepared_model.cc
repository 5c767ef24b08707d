#include "engine/planner/prepared_model.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/graph/executor.h"
#include "engine/graph/lower.h"
#include "engine/graph/ops/linear.h"
#include "engine/planner/resident_weight.h"
#include "engine/sparse/structure.h"

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

// Powers of two up to `max_batch_size`, and it.
std::vector<int64_t> BatchBuckets(int64_t max_batch_size) {
  std::vector<int64_t> buckets;
  for (int64_t batch = 1; batch < max_batch_size; batch *= 2) buckets.push_back(batch);
  buckets.push_back(std::max<int64_t>(max_batch_size, 1));
  return buckets;
}

class Model final : public PreparedModel {
 public:
  explicit Model(graph::Program program) : program_(std::move(program)) {}

  absl::Status Plan(const Device& device, const PrepareOptions& options) {
    const std::vector<int64_t> buckets = BatchBuckets(options.max_batch_size);
    std::vector<std::vector<graph::LinearBinding>> bindings(buckets.size());
    plan_.source = "dense only";
    plan_.device = device.Description();
    for (const graph::LinearOp* linear : program_.linears) {
      const Tensor& weight = *program_.weights[linear->weight()].tensor;
      dense_bytes_ += weight.bytes();
      kernels::LinearDesc desc = {buckets.back(), linear->out(), linear->in(),
                                  kernels::Layout::kDense, weight.dtype()};
      desc.count = weight.elements();
      const kernels::LinearVariant* chosen = nullptr;
      for (const kernels::LinearVariant& variant : kernels::LinearVariants()) {
        if (chosen == nullptr && variant.layout == desc.layout && variant.supports(desc))
          chosen = &variant;
      }
      if (chosen == nullptr) {
        return absl::UnimplementedError(absl::StrCat(
            program_.source, ": no dense kernel for weights of ", NameOf(weight.dtype())));
      }
      auto resident = ResidentWeight::Create(weight.view(), {}, *chosen);
      if (!resident.ok()) return resident.status();
      LayerPlan layer;
      layer.name = program_.weights[linear->weight()].name;
      layer.out = linear->out();
      layer.in = linear->in();
      layer.weight_bytes = (*resident)->bytes();
      layer.dense_bytes = weight.bytes();
      for (size_t b = 0; b < buckets.size(); ++b) {
        bindings[b].push_back({chosen, (*resident)->view()});
        layer.buckets.push_back(
            {buckets[b], buckets[b] * linear->tokens_per_item(), {{}, chosen->name}, {}, 0});
      }
      plan_.layers.push_back(std::move(layer));
      weight_bytes_ += (*resident)->bytes();
      residents_.push_back(*std::move(resident));
    }
    for (graph::Weight& weight : program_.weights) weight.tensor.reset();
    for (const graph::Value& value : program_.values) {
      if (value.constant == nullptr) continue;
      weight_bytes_ += value.constant->bytes();
      dense_bytes_ += value.constant->bytes();
    }
    executor_.emplace(program_, device, buckets, std::move(bindings));
    return absl::OkStatus();
  }

  const std::vector<formats::ValueInfo>& inputs() const override { return program_.inputs; }
  const std::vector<formats::ValueInfo>& outputs() const override { return program_.outputs; }
  const ModelPlan& plan() const override { return plan_; }
  size_t weight_bytes() const override { return weight_bytes_; }
  size_t dense_weight_bytes() const override { return dense_bytes_; }

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
  size_t weight_bytes_ = 0, dense_bytes_ = 0;
  std::vector<std::unique_ptr<ResidentWeight>> residents_;
  std::optional<graph::Executor> executor_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PreparedModel>> PreparedModel::Prepare(
    formats::ModelGraph graph, const Device& device, const PrepareOptions& options) {
  if (options.max_batch_size < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_batch_size is ", options.max_batch_size, ", expected >= 0"));
  }
  auto program = graph::Lower(std::move(graph), {.max_batch_size = options.max_batch_size});
  if (!program.ok()) return program.status();
  auto model = std::make_unique<Model>(*std::move(program));
  if (absl::Status status = model->Plan(device, options); !status.ok()) return status;
  return model;
}

}  // namespace espalier::planner
