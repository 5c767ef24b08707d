// executor_model.h — what a prepared model is on every device: a planned program with an executor over it. What differs,
// how it is planned and its executor made, is the derived class's.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "engine/graph/program.h"
#include "engine/planner/model_planner.h"
#include "engine/planner/prepared_model.h"

namespace espalier::planner {

// What a model's weights and other constants take, and would take as dense tensors of the file's types.
struct WeightBytes {
  size_t resident = 0, dense = 0;
};
WeightBytes CountWeights(const graph::Program& program, const ModelPlan& plan);

template <typename Executor, typename State>
class ExecutorModel : public PreparedModel {
 public:
  const std::vector<formats::ValueInfo>& inputs() const final { return program_.inputs; }
  const std::vector<formats::ValueInfo>& outputs() const final { return program_.outputs; }
  const ModelPlan& plan() const final { return plan_; }
  size_t weight_bytes() const final { return bytes_.resident; }
  size_t dense_weight_bytes() const final { return bytes_.dense; }

  absl::StatusOr<std::unique_ptr<ExecutionState>> NewState() const final {
    auto state = executor_->NewState();
    if (!state.ok()) return state.status();
    return std::make_unique<Running>(*std::move(state));
  }

  absl::Status Run(ExecutionState& state, int64_t batch) const final {
    return executor_->Run(static_cast<Running&>(state).state(), program_.batched ? batch : 1);
  }

 protected:
  explicit ExecutorModel(graph::Program program) : program_(std::move(program)) {}

  // Takes over everything but buckets and bindings, which the executor gets.
  void Keep(PlannedModel& planned) {
    plan_ = std::move(planned.plan);
    weights_ = std::move(planned.weights);
    bytes_ = CountWeights(program_, plan_);
  }

  graph::Program program_;

 private:
  class Running final : public ExecutionState {
   public:
    explicit Running(std::unique_ptr<State> state) : state_(std::move(state)) {}
    void* input(int i) override { return state_->input(i); }
    const void* output(int i) const override { return state_->output(i); }
    size_t arena_bytes() const override { return state_->bytes(); }
    State& state() { return *state_; }

   private:
    std::unique_ptr<State> state_;
  };

  ModelPlan plan_;
  WeightBytes bytes_;
  std::vector<std::shared_ptr<const ResidentWeight>> weights_;

 protected:
  std::unique_ptr<Executor> executor_;  // goes before what it borrows
};

}  // namespace espalier::planner
