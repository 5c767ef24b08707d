#include "engine/graph/executor.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/graph/linear_bindings.h"

namespace espalier::graph {

size_t ExecutorState::bytes() const {
  size_t bytes = arena_.size() + scratch_.size();
  for (const Buffer& buffer : inputs_) bytes += buffer.size();
  for (const Buffer& buffer : outputs_) bytes += buffer.size();
  return bytes;
}

Executor::Executor(const Program& program, const Device& device, std::vector<int64_t> buckets,
                   std::vector<std::vector<LinearBinding>> bindings)
    : program_(program),
      device_(device),
      buckets_(std::move(buckets)),
      bindings_(std::move(bindings)),
      arena_(PlanArena(program, buckets_.back())),
      scratch_bytes_(LinearScratchBytes(program, buckets_, bindings_, device.threads())) {}

absl::Status Executor::Rebind(std::vector<std::vector<LinearBinding>> bindings) {
  if (absl::Status status = CheckBindings(program_, buckets_, bindings); !status.ok())
    return status;
  bindings_ = std::move(bindings);
  scratch_bytes_ = LinearScratchBytes(program_, buckets_, bindings_, device_.threads());
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ExecutorState>> Executor::NewState() const {
  auto state = std::make_unique<ExecutorState>();
  const auto allocate = [](size_t bytes, Buffer& buffer) -> absl::Status {
    auto allocated = Buffer::Allocate(bytes);
    if (allocated.ok()) buffer = *std::move(allocated);
    return allocated.status();
  };
  if (absl::Status status = allocate(arena_.bytes, state->arena_); !status.ok()) return status;
  if (absl::Status status = allocate(scratch_bytes_, state->scratch_); !status.ok()) return status;
  state->inputs_.resize(program_.inputs.size());
  state->outputs_.resize(program_.outputs.size());
  state->values_.resize(program_.values.size(), nullptr);
  for (size_t i = 0; i < program_.values.size(); ++i) {
    const Value& value = program_.values[i];
    switch (value.role) {
      case Value::Role::kConstant:
        // Ops only read constants; the table of addresses is shared with what they write.
        state->values_[i] = const_cast<void*>(value.constant->data());
        break;
      case Value::Role::kActivation:
        state->values_[i] = state->arena_.data() + arena_.offsets[i];
        break;
      case Value::Role::kInput:
      case Value::Role::kOutput: {
        Buffer& buffer =
            (value.role == Value::Role::kInput ? state->inputs_ : state->outputs_)[value.index];
        if (absl::Status status = allocate(BytesOf(value, buckets_.back()), buffer); !status.ok())
          return status;
        state->values_[i] = buffer.data();
        break;
      }
    }
  }
  state->device_ = device_.ForOneInstance();
  state->context_ = (state->device_ == nullptr ? device_ : *state->device_).MakeContext();
  return state;
}

absl::Status Executor::Run(ExecutorState& state, int64_t batch) const {
  if (batch < 1 || batch > buckets_.back()) {
    return absl::InvalidArgumentError(
        absl::StrCat("batch ", batch, " is outside [1, ", buckets_.back(), "]"));
  }
  if (state.scratch_.size() < scratch_bytes_) {
    auto scratch = Buffer::Allocate(scratch_bytes_);
    if (!scratch.ok()) return scratch.status();
    state.scratch_ = *std::move(scratch);
  }
  const size_t bucket =
      std::lower_bound(buckets_.begin(), buckets_.end(), batch) - buckets_.begin();
  const RunContext context = {state.context_,        batch,
                              state.values_.data(),  bindings_[bucket].data(),
                              state.scratch_.data(), program_.values.data()};
  for (const Step& step : program_.steps) {
    const kernels::KernelStatus status = step.op->Run(context, step);
    if (!status.ok()) {
      return absl::InternalError(absl::StrCat(program_.source, ": node '", step.node, "' (",
                                              step.op_type, ") failed at batch ", batch, ": ",
                                              status.message));
    }
  }
  return absl::OkStatus();
}

}  // namespace espalier::graph
