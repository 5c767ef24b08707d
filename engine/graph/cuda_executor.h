// cuda_executor.h — runs a program on a GPU: per bucket of batch sizes one captured graph (copy in, layers, copy out),
// launched and waited for once a batch.
//
//   Create     uploads constants
//   NewState   memory of one running batch, lets library kernels choose their algorithms (once a layer and bucket),
//              captures the graphs and replays each once, so that every kernel is loaded before anybody is served
//   Run        one launch and one synchronisation; tensors that lie elsewhere than in the state's host memory (ReadFrom,
//              WriteTo) are copied from and to there, around a graph that has the layers alone
//
// A batch runs in the graph of its bucket: items beyond it are computed from whatever their inputs hold and thrown away,
// which harms nobody, because no op mixes the items of a batch.
#pragma once

#include <atomic>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/graph/arena_layout.h"
#include "engine/graph/program.h"
#include "engine/tensor/cuda_device.h"

namespace espalier::graph {

// The runs of one bucket that were timed: the first of every state, then one in kTimedEvery.
struct TimedRuns {
  double runs = 0, items = 0;
  double seconds = 0;  // on the device, from the first copy in to the last copy out
};
inline constexpr uint32_t kTimedEvery = 16;  // two events take the host 2 µs

// One user at a time.
class CudaExecutorState {
 public:
  static constexpr bool kCopiesAnywhere = true;
  void* input(int i) { return host_inputs_[i].get(); }
  const void* output(int i) const { return host_outputs_[i].get(); }
  // As ExecutionState: addresses of device memory, or of host memory that is pinned.
  void ReadFrom(int i, size_t offset, size_t bytes, const void* from) {
    elsewhere_.push_back({Value::Role::kInput, i, offset, bytes, const_cast<void*>(from)});
  }
  void WriteTo(int i, size_t offset, size_t bytes, void* to) {
    elsewhere_.push_back({Value::Role::kOutput, i, offset, bytes, to});
  }
  // On the device and pinned.
  size_t bytes() const;

 private:
  friend class CudaExecutor;
  // A part of an input or output that lies elsewhere in the next run.
  struct Elsewhere {
    Value::Role role;
    int index;
    size_t offset, bytes;
    void* address;
  };
  // Destroyed in reverse: graphs before what they touch.
  std::vector<CudaHandle> host_inputs_, host_outputs_, inputs_, outputs_;
  CudaHandle arena_, scratch_, stream_, begin_, end_;
  std::vector<CudaHandle> graphs_;       // per bucket
  std::vector<CudaHandle> step_graphs_;  // the same without copies; null until a run needs it
  int generation_ = 0;                   // of the bindings that they were captured with
  std::vector<Elsewhere> elsewhere_;
  std::vector<void*> values_;
  kernels::KernelContext context_;
  uint32_t runs_ = 0;
};

class CudaExecutor {
 public:
  // As Executor; the program went through PrepareForDevice, and the weights of the bindings are on the device. Frees the
  // host copies of the program's constants.
  static absl::StatusOr<std::unique_ptr<CudaExecutor>> Create(
      Program& program, const CudaDevice& device, std::vector<int64_t> buckets,
      std::vector<std::vector<LinearBinding>> bindings);

  // Over `program`, a clone of this one's, with constants of its own. ResourceExhausted without memory.
  absl::StatusOr<std::unique_ptr<CudaExecutor>> Clone(
      const Program& program, std::vector<std::vector<LinearBinding>> bindings) const;

  // ResourceExhausted without memory; Internal, with the node, when a kernel refuses.
  absl::StatusOr<std::unique_ptr<CudaExecutorState>> NewState() const;

  // 1 <= batch <= the last bucket, else InvalidArgument. Unavailable when the device is lost.
  absl::Status Run(CudaExecutorState& state, int64_t batch) const;

  // As Executor::Rebind; the first run of a state after it captures its graphs anew.
  absl::Status Rebind(std::vector<std::vector<LinearBinding>> bindings);

  size_t constant_bytes() const;              // on the device
  std::vector<TimedRuns> timed_runs() const;  // per bucket, of all states
  // The memory of the constant Program::values[value], on the device.
  void* constant(int value) const { return constants_[value].get(); }

 private:
  CudaExecutor(const Program& program, const CudaDevice& device, std::vector<int64_t> buckets,
               std::vector<std::vector<LinearBinding>> bindings);

  absl::Status Allocate(CudaExecutorState& state) const;
  absl::Status CaptureGraphs(CudaExecutorState& state) const;
  RunContext ContextOf(const CudaExecutorState& state, size_t bucket) const;
  absl::Status Settle(CudaExecutorState& state, size_t bucket) const;
  absl::Status Enqueue(CudaExecutorState& state, size_t bucket) const;
  absl::Status EnqueueCopies(CudaExecutorState& state, size_t bucket, Value::Role role) const;
  absl::Status EnqueueSteps(const CudaExecutorState& state, size_t bucket) const;
  absl::Status Copy(CudaExecutorState& state, const Value& value, size_t offset, size_t bytes,
                    void* elsewhere) const;
  absl::Status CopyParts(CudaExecutorState& state, Value::Role role, int64_t batch) const;
  absl::Status RunOnce(CudaExecutorState& state, int64_t batch) const;
  absl::Status Launch(CudaExecutorState& state, size_t bucket, int64_t batch) const;
  absl::Status LaunchGraph(CudaExecutorState& state, const CudaHandle& graph, size_t bucket) const;
  absl::Status LaunchWithParts(CudaExecutorState& state, size_t bucket, int64_t batch) const;
  absl::Status Replay(CudaExecutorState& state, size_t bucket, int64_t batch) const;
  absl::Status ReplayTimed(CudaExecutorState& state, size_t bucket, int64_t batch) const;
  absl::Status ExplainRun(const kernels::KernelStatus& status, size_t bucket) const;

  const Program& program_;
  const CudaDevice& device_;
  const std::vector<int64_t> buckets_;
  std::vector<std::vector<LinearBinding>> bindings_;
  int generation_ = 0;  // of the bindings
  const ArenaLayout arena_;
  size_t scratch_bytes_ = 0;
  std::vector<CudaHandle> constants_;  // per value; empty for others
  // Problems whose library algorithm is chosen; under the device's setup mutex.
  using Problem = std::tuple<const kernels::LinearVariant*, int64_t, int64_t, int64_t, bool, bool,
                             kernels::Activation, int64_t, int64_t, int64_t>;
  mutable std::set<Problem> settled_;
  struct Counters {
    std::atomic<uint64_t> runs{0}, items{0}, nanos{0};
  };
  mutable std::vector<Counters> timed_;  // per bucket
};

}  // namespace espalier::graph
