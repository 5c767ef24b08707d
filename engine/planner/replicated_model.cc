#include "engine/planner/replicated_model.h"

#include <atomic>
#include <utility>

namespace espalier::planner {
namespace {

class State final : public ExecutionState {
 public:
  State(std::unique_ptr<ExecutionState> state, int replica)
      : state_(std::move(state)), replica_(replica) {}
  void* input(int i) override { return state_->input(i); }
  const void* output(int i) const override { return state_->output(i); }
  size_t arena_bytes() const override { return state_->arena_bytes(); }
  bool copies_anywhere() const override { return state_->copies_anywhere(); }
  void ReadFrom(int i, size_t offset, size_t bytes, const void* from) override {
    state_->ReadFrom(i, offset, bytes, from);
  }
  void WriteTo(int i, size_t offset, size_t bytes, void* to) override {
    state_->WriteTo(i, offset, bytes, to);
  }
  ExecutionState& state() { return *state_; }
  int replica() const { return replica_; }

 private:
  std::unique_ptr<ExecutionState> state_;
  const int replica_;
};

// The same, of every replica.
struct Edits final : WeightEdits {
  std::vector<std::unique_ptr<WeightEdits>> replicas;

  absl::Status Apply(const TensorEdit& piece) override {
    for (const auto& replica : replicas) {
      if (absl::Status status = replica->Apply(piece); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
  absl::Status Finish() override {
    for (const auto& replica : replicas) {
      if (absl::Status status = replica->Finish(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
};

class ReplicatedModel final : public PreparedModel {
 public:
  ReplicatedModel(std::vector<std::unique_ptr<PreparedModel>> replicas, std::vector<int> placement)
      : replicas_(std::move(replicas)), placement_(std::move(placement)) {}

  const std::vector<formats::ValueInfo>& inputs() const override { return replicas_[0]->inputs(); }
  const std::vector<formats::ValueInfo>& outputs() const override {
    return replicas_[0]->outputs();
  }
  const ModelPlan& plan() const override { return replicas_[0]->plan(); }
  size_t weight_bytes() const override {
    size_t bytes = 0;
    for (const auto& replica : replicas_) bytes += replica->weight_bytes();
    return bytes;
  }
  size_t dense_weight_bytes() const override {
    return replicas_[0]->dense_weight_bytes() * replicas_.size();
  }
  int instances() const override { return static_cast<int>(placement_.size()); }

  DeviceWork device_work() const override {
    DeviceWork all;
    for (const auto& replica : replicas_) {
      const DeviceWork work = replica->device_work();
      all.seconds += work.seconds;
      all.flops += work.flops;
      all.bytes += work.bytes;
      all.peak = work.peak;
    }
    return all;
  }

  absl::StatusOr<std::unique_ptr<ExecutionState>> NewState() const override {
    const int replica = placement_[next_.fetch_add(1) % placement_.size()];
    auto state = replicas_[replica]->NewState();
    if (!state.ok()) return state.status();
    return std::make_unique<State>(*std::move(state), replica);
  }

  absl::Status Run(ExecutionState& state, int64_t batch) const override {
    auto& placed = static_cast<State&>(state);
    return replicas_[placed.replica()]->Run(placed.state(), batch);
  }

  absl::StatusOr<std::unique_ptr<PreparedModel>> Clone() const override {
    std::vector<std::unique_ptr<PreparedModel>> replicas;
    for (const auto& replica : replicas_) {
      auto clone = replica->Clone();
      if (!clone.ok()) return clone.status();
      replicas.push_back(*std::move(clone));
    }
    return std::make_unique<ReplicatedModel>(std::move(replicas), placement_);
  }

  absl::StatusOr<std::unique_ptr<WeightEdits>> BeginEdit(
      const formats::WeightSource& after) override {
    auto edits = std::make_unique<Edits>();
    for (const auto& replica : replicas_) {
      auto begun = replica->BeginEdit(after);
      if (!begun.ok()) return begun.status();
      edits->replicas.push_back(*std::move(begun));
    }
    return edits;
  }

  // The first one's are told: all have the same weights, on devices of a kind.
  std::vector<WeightReplan> PlanDrifted(const formats::WeightSource& now) override {
    std::vector<WeightReplan> first;
    for (size_t i = 0; i < replicas_.size(); ++i) {
      auto replans = replicas_[i]->PlanDrifted(now);
      if (i == 0) first = std::move(replans);
    }
    return first;
  }

 private:
  const std::vector<std::unique_ptr<PreparedModel>> replicas_;
  const std::vector<int> placement_;
  mutable std::atomic<size_t> next_ = 0;
};

}  // namespace

std::unique_ptr<PreparedModel> MakeReplicatedModel(
    std::vector<std::unique_ptr<PreparedModel>> replicas, std::vector<int> placement) {
  return std::make_unique<ReplicatedModel>(std::move(replicas), std::move(placement));
}

}  // namespace espalier::planner
