#include "engine/planner/prepared_model.h"

#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "engine/graph/executor.h"
#include "engine/graph/lower.h"
#include "engine/planner/cuda_model.h"
#include "engine/planner/executor_model.h"

namespace espalier::planner {
namespace {

class Model final : public ExecutorModel<graph::Executor, graph::ExecutorState> {
 public:
  using ExecutorModel::ExecutorModel;

  absl::Status Plan() {
    auto planned = PlanModel(program_, device_, options_);
    if (!planned.ok()) return planned.status();
    Bind(*std::move(planned));
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<PreparedModel>> Clone() const override {
    auto program = graph::CloneOf(program_);
    if (!program.ok()) return program.status();
    auto planned = planned_.Clone();
    if (!planned.ok()) return planned.status();
    auto clone = std::make_unique<Model>(*std::move(program), device_, options_);
    clone->Bind(*std::move(planned));
    return clone;
  }

 private:
  void Bind(PlannedModel planned) {
    Keep(std::move(planned));
    executor_ =
        std::make_unique<graph::Executor>(program_, device_, planned_.buckets, planned_.Bindings());
  }
  void* ConstantMemory(int value) const override {
    return const_cast<void*>(program_.values[value].constant->data());  // the program is ours
  }
};

}  // namespace

absl::Status PreparedModel::Edit(absl::Span<const TensorEdit> edits,
                                 const formats::WeightSource& after) {
  auto editing = BeginEdit(after);
  if (!editing.ok()) return editing.status();
  for (const TensorEdit& edit : edits) {
    if (absl::Status status = (*editing)->Apply(edit); !status.ok()) return status;
  }
  return (*editing)->Finish();
}

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
  auto model = std::make_unique<Model>(*std::move(program), device, options);
  if (absl::Status status = model->Plan(); !status.ok()) return status;
  return model;
}

}  // namespace espalier::planner
