#include "engine/graph/cuda_executor.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/graph/linear_bindings.h"
#include "engine/graph/ops/linear.h"
#include "kernels/cuda/variants.h"

namespace espalier::graph {

size_t CudaExecutorState::bytes() const {
  size_t bytes = arena_.bytes() + scratch_.bytes();
  for (const auto* handles : {&host_inputs_, &host_outputs_, &inputs_, &outputs_}) {
    for (const CudaHandle& handle : *handles) bytes += handle.bytes();
  }
  return bytes;
}

CudaExecutor::CudaExecutor(const Program& program, const CudaDevice& device,
                           std::vector<int64_t> buckets,
                           std::vector<std::vector<LinearBinding>> bindings)
    : program_(program),
      device_(device),
      buckets_(std::move(buckets)),
      bindings_(std::move(bindings)),
      arena_(PlanArena(program, buckets_.back())),
      scratch_bytes_(LinearScratchBytes(program, buckets_, bindings_, device.threads())),
      timed_(buckets_.size()) {}

absl::StatusOr<std::unique_ptr<CudaExecutor>> CudaExecutor::Create(
    Program& program, const CudaDevice& device, std::vector<int64_t> buckets,
    std::vector<std::vector<LinearBinding>> bindings) {
  std::unique_ptr<CudaExecutor> executor(
      new CudaExecutor(program, device, std::move(buckets), std::move(bindings)));
  executor->constants_.resize(program.values.size());
  for (size_t i = 0; i < program.values.size(); ++i) {
    Value& value = program.values[i];
    if (value.role != Value::Role::kConstant) continue;
    auto constant = device.Upload(value.constant->data(), value.constant->bytes());
    if (!constant.ok()) return constant.status();
    executor->constants_[i] = *std::move(constant);
    value.constant.reset();
  }
  return executor;
}

absl::StatusOr<std::unique_ptr<CudaExecutor>> CudaExecutor::Clone(
    const Program& program, std::vector<std::vector<LinearBinding>> bindings) const {
  std::unique_ptr<CudaExecutor> clone(
      new CudaExecutor(program, device_, buckets_, std::move(bindings)));
  for (const CudaHandle& constant : constants_) {
    clone->constants_.emplace_back();
    if (constant.get() == nullptr) continue;
    auto copy = device_.CopyOf(constant);
    if (!copy.ok()) return copy.status();
    clone->constants_.back() = *std::move(copy);
  }
  return clone;
}

size_t CudaExecutor::constant_bytes() const {
  size_t bytes = 0;
  for (const CudaHandle& constant : constants_) bytes += constant.bytes();
  return bytes;
}

absl::Status CudaExecutor::Allocate(CudaExecutorState& state) const {
  const auto place = [](absl::StatusOr<CudaHandle> made, CudaHandle& handle) -> absl::Status {
    if (made.ok()) handle = *std::move(made);
    return made.status();
  };
  for (absl::Status status :
       {place(device_.Allocate(arena_.bytes), state.arena_),
        place(device_.Allocate(scratch_bytes_), state.scratch_),
        place(device_.NewStream(), state.stream_), place(device_.NewEvent(), state.begin_),
        place(device_.NewEvent(), state.end_)}) {
    if (!status.ok()) return status;
  }
  state.host_inputs_.resize(program_.inputs.size());
  state.inputs_.resize(program_.inputs.size());
  state.host_outputs_.resize(program_.outputs.size());
  state.outputs_.resize(program_.outputs.size());
  state.values_.resize(program_.values.size(), nullptr);
  for (size_t i = 0; i < program_.values.size(); ++i) {
    const Value& value = program_.values[i];
    if (value.role == Value::Role::kConstant) {
      state.values_[i] = constants_[i].get();
    } else if (value.role == Value::Role::kActivation) {
      state.values_[i] = state.arena_.data() + arena_.offsets[i];
    } else {
      const bool is_input = value.role == Value::Role::kInput;
      CudaHandle& host = (is_input ? state.host_inputs_ : state.host_outputs_)[value.index];
      CudaHandle& memory = (is_input ? state.inputs_ : state.outputs_)[value.index];
      const size_t bytes = BytesOf(value, buckets_.back());
      absl::Status status = place(device_.AllocatePinned(bytes), host);
      if (status.ok()) status = place(device_.Allocate(bytes), memory);
      if (!status.ok()) return status;
      state.values_[i] = memory.get();
    }
  }
  state.context_ = device_.MakeContext();
  state.context_.stream = state.stream_.get();
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CudaExecutorState>> CudaExecutor::NewState() const {
  auto state = std::make_unique<CudaExecutorState>();
  if (absl::Status status = Allocate(*state); !status.ok()) return status;
  // What items beyond the first batches compute from.
  for (const CudaHandle& host : state->host_inputs_)
    std::fill_n(host.data(), host.bytes(), std::byte{0});
  if (absl::Status status = CaptureGraphs(*state); !status.ok()) return status;
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    absl::Status status = Replay(*state, bucket, buckets_[bucket]);
    if (!status.ok()) return status;
  }
  return state;
}

absl::Status CudaExecutor::CaptureGraphs(CudaExecutorState& state) const {
  const std::lock_guard lock(device_.setup_mutex());
  state.graphs_.clear();
  state.step_graphs_.clear();
  state.step_graphs_.resize(buckets_.size());
  if (scratch_bytes_ > state.scratch_.bytes()) {
    auto scratch = device_.Allocate(scratch_bytes_);
    if (!scratch.ok()) return scratch.status();
    state.scratch_ = *std::move(scratch);
  }
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (absl::Status status = Settle(state, bucket); !status.ok()) return status;
    auto graph = device_.Capture(state.stream_.get(), [&] { return Enqueue(state, bucket); });
    if (!graph.ok()) return graph.status();
    state.graphs_.push_back(*std::move(graph));
  }
  state.generation_ = generation_;
  return absl::OkStatus();
}

absl::Status CudaExecutor::Rebind(std::vector<std::vector<LinearBinding>> bindings) {
  if (absl::Status status = CheckBindings(program_, buckets_, bindings); !status.ok())
    return status;
  bindings_ = std::move(bindings);
  scratch_bytes_ = LinearScratchBytes(program_, buckets_, bindings_, device_.threads());
  ++generation_;
  return absl::OkStatus();
}

RunContext CudaExecutor::ContextOf(const CudaExecutorState& state, size_t bucket) const {
  return {state.context_,           buckets_[bucket],     state.values_.data(),
          bindings_[bucket].data(), state.scratch_.get(), program_.values.data()};
}

absl::Status CudaExecutor::Settle(CudaExecutorState& state, size_t bucket) const {
  const RunContext context = ContextOf(state, bucket);
  for (const Step& step : program_.steps) {
    const auto* linear = dynamic_cast<const LinearOp*>(step.op.get());
    if (linear == nullptr) continue;
    const kernels::LinearVariant* variant = bindings_[bucket][linear->layer()].variant;
    const kernels::LinearArgs args = linear->Args(context, step);
    const Problem problem = {variant,
                             args.tokens,
                             linear->out(),
                             linear->in(),
                             args.bias != nullptr,
                             args.residual != nullptr,
                             args.activation,
                             args.x_stride,
                             args.y_stride,
                             args.residual_stride};
    if (!settled_.insert(problem).second) continue;
    const auto status =
        device_.module().settle(kernels::cuda::KernelOf(*variant), context.kernel, args);
    if (!status.ok()) {
      return device_.Explain(status, absl::StrCat(program_.source, ": node '", step.node, "', ",
                                                  variant->name, " at batch ", context.batch));
    }
  }
  return absl::OkStatus();
}

// Between the device and the state's host memory, or `elsewhere` if that is not null.
absl::Status CudaExecutor::Copy(CudaExecutorState& state, const Value& value, size_t offset,
                                size_t bytes, void* elsewhere) const {
  const bool is_input = value.role == Value::Role::kInput;
  auto& host = (is_input ? state.host_inputs_ : state.host_outputs_)[value.index];
  void* const outside = elsewhere != nullptr ? elsewhere : host.data() + offset;
  void* const inside = (is_input ? state.inputs_ : state.outputs_)[value.index].data() + offset;
  const auto status = device_.module().copy(
      is_input ? inside : outside, is_input ? outside : inside, bytes, state.stream_.get());
  return status.ok() ? absl::OkStatus()
                     : device_.Explain(status, absl::StrCat("copy '", value.name, "'"));
}

absl::Status CudaExecutor::EnqueueCopies(CudaExecutorState& state, size_t bucket,
                                         Value::Role role) const {
  for (const Value& value : program_.values) {
    if (value.role != role) continue;
    absl::Status status = Copy(state, value, 0, BytesOf(value, buckets_[bucket]), nullptr);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// The parts of tensors that lie elsewhere, and what is between them.
absl::Status CudaExecutor::CopyParts(CudaExecutorState& state, Value::Role role,
                                     int64_t batch) const {
  for (const Value& value : program_.values) {
    if (value.role != role) continue;
    const size_t end = BytesOf(value, batch);
    size_t done = 0;
    absl::Status status;
    const auto copy_until = [&](size_t until) {
      if (status.ok() && until > done) status = Copy(state, value, done, until - done, nullptr);
    };
    for (const auto& part : state.elsewhere_) {
      if (part.role != role || part.index != value.index) continue;
      if (part.offset > end || part.bytes > end - part.offset) {
        return absl::InternalError(absl::StrCat("'", value.name, "' has ", end,
                                                " bytes, got a part of ", part.bytes, " at ",
                                                part.offset));
      }
      copy_until(part.offset);
      if (status.ok() && part.bytes > 0)
        status = Copy(state, value, part.offset, part.bytes, part.address);
      done = std::max(done, part.offset + part.bytes);
    }
    copy_until(end);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CudaExecutor::EnqueueSteps(const CudaExecutorState& state, size_t bucket) const {
  const RunContext context = ContextOf(state, bucket);
  for (const Step& step : program_.steps) {
    const kernels::KernelStatus status = step.op->Run(context, step);
    if (!status.ok()) {
      return device_.Explain(status, absl::StrCat(program_.source, ": node '", step.node, "' (",
                                                  step.op_type, ") at batch ", context.batch));
    }
  }
  return absl::OkStatus();
}

absl::Status CudaExecutor::Enqueue(CudaExecutorState& state, size_t bucket) const {
  absl::Status status = EnqueueCopies(state, bucket, Value::Role::kInput);
  if (status.ok()) status = EnqueueSteps(state, bucket);
  return status.ok() ? EnqueueCopies(state, bucket, Value::Role::kOutput) : status;
}

absl::Status CudaExecutor::LaunchWithParts(CudaExecutorState& state, size_t bucket,
                                           int64_t batch) const {
  CudaHandle& graph = state.step_graphs_[bucket];
  if (graph.get() == nullptr) {
    const std::lock_guard lock(device_.setup_mutex());
    auto captured =
        device_.Capture(state.stream_.get(), [&] { return EnqueueSteps(state, bucket); });
    if (!captured.ok()) return captured.status();
    graph = *std::move(captured);
  }
  absl::Status status = CopyParts(state, Value::Role::kInput, batch);
  if (status.ok()) status = LaunchGraph(state, graph, bucket);
  return status.ok() ? CopyParts(state, Value::Role::kOutput, batch) : status;
}

absl::Status CudaExecutor::LaunchGraph(CudaExecutorState& state, const CudaHandle& graph,
                                       size_t bucket) const {
  return ExplainRun(device_.module().launch_graph(graph.get(), state.stream_.get()), bucket);
}

absl::Status CudaExecutor::Launch(CudaExecutorState& state, size_t bucket, int64_t batch) const {
  return state.elsewhere_.empty() ? LaunchGraph(state, state.graphs_[bucket], bucket)
                                  : LaunchWithParts(state, bucket, batch);
}

absl::Status CudaExecutor::ExplainRun(const kernels::KernelStatus& status, size_t bucket) const {
  if (status.ok()) return absl::OkStatus();
  return device_.Explain(status,
                         absl::StrCat(program_.source, " at batch up to ", buckets_[bucket]));
}

absl::Status CudaExecutor::Replay(CudaExecutorState& state, size_t bucket, int64_t batch) const {
  absl::Status launched = Launch(state, bucket, batch);
  // Also after a failure: what is under way uses memory that is somebody else's later.
  const auto waited = device_.module().synchronize_stream(state.stream_.get());
  return launched.ok() ? ExplainRun(waited, bucket) : launched;
}

absl::Status CudaExecutor::ReplayTimed(CudaExecutorState& state, size_t bucket,
                                       int64_t batch) const {
  const auto& module = device_.module();
  kernels::KernelStatus status = module.record_event(state.begin_.get(), state.stream_.get());
  absl::Status launched = Launch(state, bucket, batch);
  if (status.ok()) status = module.record_event(state.end_.get(), state.stream_.get());
  const auto waited = module.synchronize_stream(state.stream_.get());
  if (!launched.ok()) return launched;
  if (status.ok()) status = waited;
  float micros = 0;
  if (status.ok()) status = module.elapsed_micros(state.begin_.get(), state.end_.get(), &micros);
  if (!status.ok()) return ExplainRun(status, bucket);
  Counters& counters = timed_[bucket];
  counters.runs.fetch_add(1, std::memory_order_relaxed);
  counters.items.fetch_add(batch, std::memory_order_relaxed);
  counters.nanos.fetch_add(static_cast<uint64_t>(micros * 1000), std::memory_order_relaxed);
  return absl::OkStatus();
}

std::vector<TimedRuns> CudaExecutor::timed_runs() const {
  std::vector<TimedRuns> all;
  for (const Counters& counters : timed_) {
    const auto value = [](const std::atomic<uint64_t>& counter) {
      return static_cast<double>(counter.load(std::memory_order_relaxed));
    };
    all.push_back({value(counters.runs), value(counters.items), value(counters.nanos) * 1e-9});
  }
  return all;
}

absl::Status CudaExecutor::RunOnce(CudaExecutorState& state, int64_t batch) const {
  if (batch < 1 || batch > buckets_.back()) {
    return absl::InvalidArgumentError(
        absl::StrCat("batch ", batch, " is outside [1, ", buckets_.back(), "]"));
  }
  if (absl::Status status = device_.Use(); !status.ok()) return status;
  if (state.generation_ != generation_) {
    if (absl::Status status = CaptureGraphs(state); !status.ok()) return status;
  }
  const size_t bucket =
      std::lower_bound(buckets_.begin(), buckets_.end(), batch) - buckets_.begin();
  return state.runs_++ % kTimedEvery == 0 ? ReplayTimed(state, bucket, batch)
                                          : Replay(state, bucket, batch);
}

absl::Status CudaExecutor::Run(CudaExecutorState& state, int64_t batch) const {
  absl::Status status = RunOnce(state, batch);
  state.elsewhere_.clear();
  return status;
}

}  // namespace espalier::graph
