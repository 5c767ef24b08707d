// prepared_model.h — a model that is lowered, planned and resident: what the runtime runs.
//
//   ModelGraph ──lower, fuse──▶ Program ──choose──▶ ModelPlan ──build──▶ PreparedModel
//
// Immutable after Prepare and shared between instances; each instance owns an ExecutionState (its
// static arena).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/formats/model_graph.h"
#include "engine/formats/precision.h"
#include "engine/formats/weight_memory.h"
#include "engine/formats/weight_source.h"
#include "engine/planner/plan.h"
#include "engine/planner/weight_edit.h"
#include "engine/tensor/device.h"

namespace espalier::planner {

using formats::WeightMemory;

struct PrepareOptions {
  // Largest batch; buckets are the powers of two up to it, and it. 0: the model has no batch
  // dimension (one bucket).
  int64_t max_batch_size = 256;
  WeightMemory weight_memory = WeightMemory::kBalanced;
  // One variant per layer for all batch sizes, chosen without measuring: bit-identical answers
  // whatever the batch.
  bool deterministic = false;
  bool flush_subnormals = false;
  // On a GPU: the type of weights and activations. As stored: bf16 or f16 when all weights are, else
  // f32. The CPU computes in f32 with weights as stored.
  formats::Precision precision = formats::Precision::kAsStored;
  // Directory for plan caches; empty: measure every time. Bad and newer cache files are ignored
  // with one log line per model.
  std::string plan_cache_dir;
  // Total time for measuring candidates at load, without the time spent waiting while other loads
  // measure; what is left unmeasured is decided by the cost model.
  int64_t measure_budget_millis = 3000;
  // On a GPU: measures what DeviceWork::peak says, once for each kind of GPU and type in this process.
  bool measure_peak = false;
};

// What a device reaches at its best; 0: not measured.
struct DevicePeak {
  double flops = 0;  // a second, in the type that the model computes in
  double bytes = 0;  // a second, of memory
};

// What the linear layers of a model did in the runs that were timed, and what their device can do: achieved rates are
// flops / seconds and bytes / seconds. Flops are of non-zero weights and of items that were asked for; bytes are weights as
// they are stored, and x and y. Seconds are the device's, of the whole run, copies and other layers included.
struct DeviceWork {
  double seconds = 0, flops = 0, bytes = 0;
  DevicePeak peak;
};

// A weight whose non-zeros moved so far that the planner was asked again.
struct WeightReplan {
  std::string weight;
  double moved =
      0;  // non-zeros that came or went since it was planned, as a share of those that it had
  std::string before, after;  // its layouts, "csr+dense"
  bool changed = false;       // packed anew; else it runs as before
  absl::Status status;        // why it was not planned: then it runs as before, too
};

// Per-instance memory: input and output buffers and all activations, sized for max_batch_size at
// creation; nothing is allocated while serving. Not thread-safe; use one per running batch.
class ExecutionState;

class PreparedModel {
 public:
  // Errors name the node: Unimplemented for an op, attribute or type that cannot run, with what to
  // do about it; InvalidArgument for shapes that do not fit; ResourceExhausted without memory.
  static absl::StatusOr<std::unique_ptr<PreparedModel>> Prepare(formats::ModelGraph graph,
                                                                const Device& device,
                                                                const PrepareOptions& options);
  virtual ~PreparedModel() = default;

  virtual const std::vector<formats::ValueInfo>& inputs() const = 0;
  virtual const std::vector<formats::ValueInfo>& outputs() const = 0;
  virtual const ModelPlan& plan() const = 0;
  virtual size_t weight_bytes() const = 0;  // resident: weights in their layouts and biases
  virtual size_t dense_weight_bytes()
      const = 0;  // what the same weights take as dense tensors of the file's dtype

  // How many instances its devices are meant for; 0: as many as the config says.
  virtual int instances() const { return 0; }
  virtual absl::StatusOr<std::unique_ptr<ExecutionState>> NewState() const = 0;

  // Of all replicas and instances. Nothing (seconds = 0) on the CPU, whose time is the callers'.
  virtual DeviceWork device_work() const { return {}; }

  // Runs `batch` items, 1 ≤ batch ≤ max_batch_size (ignored when it is 0), from the state's input
  // buffers to its output buffers, in the calling thread plus the device's. Bit-identical per item
  // in deterministic mode.
  virtual absl::Status Run(ExecutionState& state, int64_t batch) const = 0;

  // The same model with weights of its own, for Edit: without the file, and without room for more than it takes.
  // Nothing edits this one meanwhile; it may run. ResourceExhausted without memory.
  virtual absl::StatusOr<std::unique_ptr<PreparedModel>> Clone() const {
    return absl::UnimplementedError("this model cannot be cloned");
  }

  // Brings the weights to what `after` says, the edits being all that differs: in place where the
  // layout has room for it, else by building that one weight anew from `after`, which outlives them. Nothing
  // runs on the model meanwhile; its states stay valid. FailedPrecondition when an element that is replaced is not
  // what the edit says it was; Unimplemented when a changed tensor went through more than a layout on
  // its way into the model: prepare the model from the new weights then.
  virtual absl::StatusOr<std::unique_ptr<WeightEdits>> BeginEdit(
      const formats::WeightSource& /*after*/) {
    return absl::UnimplementedError("this model's weights cannot be edited");
  }
  // Asks the planner again for weights whose structure has drifted since it was asked (plan_drift.h), `now` being what they
  // are, and packs those anew that it chooses otherwise for. Answers are as right whatever comes of it. Terms as of
  // BeginEdit. None in deterministic mode, where edits see to it.
  virtual std::vector<WeightReplan> PlanDrifted(const formats::WeightSource& /*now*/) { return {}; }
  // BeginEdit, with edits that are all there.
  absl::Status Edit(absl::Span<const TensorEdit> edits, const formats::WeightSource& after);
};

class ExecutionState {
 public:
  virtual ~ExecutionState() = default;
  // Buffers of input/output i in its declared dtype, row-major, item after item; 64-byte aligned,
  // stable addresses.
  virtual void* input(int i) = 0;
  virtual const void* output(int i) const = 0;
  virtual size_t arena_bytes() const = 0;

  // Where the device copies by itself: for the next Run alone, bytes [offset, offset + bytes) of input i are at `from`, of
  // output i wanted at `to` (TensorMemory::DeviceAddress), and not in the buffers above. Parts of a tensor come in
  // ascending order.
  virtual bool copies_anywhere() const { return false; }
  virtual void ReadFrom(int /*i*/, size_t /*offset*/, size_t /*bytes*/, const void* /*from*/) {}
  virtual void WriteTo(int /*i*/, size_t /*offset*/, size_t /*bytes*/, void* /*to*/) {}
};

}  // namespace espalier::planner
