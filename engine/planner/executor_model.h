// executor_model.h — what a prepared model is on every device: a planned program with an executor over it. What differs,
// how it is planned and its executor made, is the derived class's.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "engine/graph/program.h"
#include "engine/planner/model_planner.h"
#include "engine/planner/plan_drift.h"
#include "engine/planner/prepared_model.h"
#include "engine/planner/weight_editor.h"

namespace espalier::planner {

// What a model's weights and other constants take, and would take as dense tensors of the file's types.
struct WeightBytes {
  size_t resident = 0, dense = 0;
};
WeightBytes CountWeights(const graph::Program& program, const ModelPlan& plan);

template <typename Executor, typename State>
class ExecutorModel : public PreparedModel {
 public:
  ExecutorModel(graph::Program program, const Device& device, PrepareOptions options)
      : program_(std::move(program)), device_(device), options_(std::move(options)) {}

  const std::vector<formats::ValueInfo>& inputs() const final { return program_.inputs; }
  const std::vector<formats::ValueInfo>& outputs() const final { return program_.outputs; }
  const ModelPlan& plan() const final { return planned_.plan; }
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

  absl::StatusOr<std::unique_ptr<WeightEdits>> BeginEdit(const formats::WeightSource& after) final {
    return std::make_unique<WeightEditor>(
        program_, planned_, device_, options_, after,
        [this](int value) { return ConstantMemory(value); }, [this] { return Rebind(); });
  }

  std::vector<WeightReplan> PlanDrifted(const formats::WeightSource& now) final {
    std::vector<WeightReplan> replans;
    if (options_.deterministic) return replans;
    for (const int weight : DriftedWeights(planned_)) {
      auto anew = PlanAnew(program_, planned_, device_, options_, weight, now);
      absl::Status status = anew.status();
      if (anew.ok() && anew->replan.changed) {
        status = executor_->Rebind(anew->planned.Bindings());
        if (status.ok()) status = TryOut();
        if (!status.ok()) (void)executor_->Rebind(planned_.Bindings());  // as it was: they fit
      }
      if (status.ok()) {
        replans.push_back(std::move(anew->replan));
        planned_ = std::move(anew->planned);
        CountResident();
      } else {
        replans.push_back({.weight = program_.weights[weight].name, .status = std::move(status)});
        planned_.weights[weight].moved = 0;  // not again before as much moved once more
      }
    }
    PlanChanged();
    return replans;
  }

 protected:
  void Keep(PlannedModel planned) {
    planned_ = std::move(planned);
    bytes_ = CountWeights(program_, planned_.plan);
  }
  // What a clone of `model` keeps: the same bytes, although constants may have left the program.
  void KeepAs(const ExecutorModel& model, PlannedModel planned) {
    planned_ = std::move(planned);
    bytes_ = model.bytes_;
  }
  // What is derived from the plan is to be derived again.
  virtual void PlanChanged() {}
  // Whether kernels take what they are bound to that were never run before.
  virtual absl::Status TryOut() const { return absl::OkStatus(); }
  // Where the constant Program::values[value] is.
  virtual void* ConstantMemory(int value) const = 0;

  graph::Program program_;
  const Device& device_;
  const PrepareOptions options_;
  PlannedModel planned_;

 private:
  class Running final : public ExecutionState {
   public:
    explicit Running(std::unique_ptr<State> state) : state_(std::move(state)) {}
    void* input(int i) override { return state_->input(i); }
    const void* output(int i) const override { return state_->output(i); }
    size_t arena_bytes() const override { return state_->bytes(); }
    bool copies_anywhere() const override { return State::kCopiesAnywhere; }
    void ReadFrom(int i, size_t offset, size_t bytes, const void* from) override {
      if constexpr (State::kCopiesAnywhere) state_->ReadFrom(i, offset, bytes, from);
    }
    void WriteTo(int i, size_t offset, size_t bytes, void* to) override {
      if constexpr (State::kCopiesAnywhere) state_->WriteTo(i, offset, bytes, to);
    }
    State& state() { return *state_; }

   private:
    std::unique_ptr<State> state_;
  };

  // Weights were built anew, so that they have other views.
  absl::Status Rebind() {
    CountResident();
    return executor_->Rebind(planned_.Bindings());
  }

  void CountResident() {
    bytes_.resident -= planned_.plan.weight_bytes;
    planned_.plan.weight_bytes = planned_.weight_bytes();
    bytes_.resident += planned_.plan.weight_bytes;
  }

  WeightBytes bytes_;

 protected:
  std::unique_ptr<Executor> executor_;  // goes before what it borrows
};

}  // namespace espalier::planner
