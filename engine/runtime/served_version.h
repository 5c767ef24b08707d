// served_version.h — one version of one model, resident and running: its instances, their queue,
// its statistics.
//
//   Submit ──▶ BindRequest ──▶ Batcher ──▶ instance 0 … N−1 ──▶ Answer
//                │                         (a thread and an ExecutionState each)
//                └──────▶ run by the caller itself, when that is quick and nothing waits
//
// Immutable but for queue and statistics. Held through VersionHandle: a handle pins the version,
// every request holds one until it is answered, and the destructor (which joins the instances) runs
// on the thread that ModelManager chooses, never on an instance or a front end thread.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/formats/model_config.h"
#include "engine/formats/model_settings.h"
#include "engine/planner/prepared_model.h"
#include "engine/runtime/answer_order.h"
#include "engine/runtime/arrival_gap.h"
#include "engine/runtime/batcher.h"
#include "engine/runtime/batching_policy.h"
#include "engine/runtime/infer_request.h"
#include "engine/runtime/labels.h"
#include "engine/runtime/signature.h"
#include "engine/runtime/statistics.h"

namespace espalier::runtime {

class ServedVersion {
 public:
  struct Options {
    std::string name;
    int64_t version = 0;
    inference::ModelConfig config;  // complete
    std::unique_ptr<planner::PreparedModel> model;
    Labels labels;
    std::shared_ptr<ModelLatency> latency;  // shared by the versions of a model
    int64_t default_max_pending = 0;        // when the config sets no max_queue_size; 0: no limit
    absl::StatusCode overload_code =
        absl::StatusCode::kUnavailable;  // that overloads are counted with
    double load_seconds = 0;             // reading, planning and preparing
  };

  // Makes the instances and starts their threads. InvalidArgument for a config that contradicts the
  // model or asks for what this build has not (a GPU instance), ResourceExhausted without memory.
  static absl::StatusOr<std::unique_ptr<ServedVersion>> Create(Options options);
  // Answers what is still queued, joins the instances, frees the model.
  ~ServedVersion();
  // The same, but for the model, which nothing runs on any more.
  static std::unique_ptr<planner::PreparedModel> TakeModel(std::unique_ptr<ServedVersion> version);

  // Checks the request and queues it, or runs it at once when that is quick; it is answered through
  // Answer in every case, perhaps before Submit returns. `request->version` must be a handle of
  // this version; the caller holds another one while it calls.
  void Submit(InferRequest* request);
  // Answers a request that the front end found faulty, so that it is counted like those that Submit
  // refuses. Same terms.
  void Refuse(InferRequest* request, absl::Status status) {
    const FailureReason reason = ReasonOf(status.code());
    Complete(request, {std::move(status), reason});
  }

  const std::string& name() const { return signature_.model; }
  int64_t version() const { return options_.version; }
  const Signature& signature() const { return signature_; }
  // With the plan in its parameters, see plan_parameters.h.
  const inference::ModelConfig& config() const { return options_.config; }
  const planner::PreparedModel& model() const { return *options_.model; }
  // Of the classes of output `index`; may be empty, or fewer than classes.
  absl::Span<const std::string> labels(int index) const;
  const Labels& labels() const { return options_.labels; }
  const std::shared_ptr<ModelLatency>& latency() const { return options_.latency; }
  const VersionStatistics& statistics() const { return statistics_; }
  // Whether batches are counted whose floats went in finite and came out otherwise.
  void WatchOutputs(bool watch) { watches_outputs_.store(watch, std::memory_order_relaxed); }
  uint64_t nonfinite_batches() const { return nonfinite_batches_.load(std::memory_order_relaxed); }
  int64_t pending() const { return batcher_.pending(); }
  // The same by priority level, see Batcher.
  using LevelPending = Batcher::LevelPending;
  std::vector<LevelPending> PendingByLevel() const { return batcher_.PendingByLevel(); }
  double load_seconds() const { return options_.load_seconds; }
  int instances() const { return static_cast<int>(instances_.size()); }
  size_t arena_bytes() const;  // of all instances

 private:
  ServedVersion(Options options, Signature signature, BatchingPolicy policy,
                const formats::ModelSettings& settings);
  absl::Status StartInstances();
  void StopInstances();
  // Running and being run: the thread of the instance, or a caller of Submit that borrows it.
  struct Instance {
    std::unique_ptr<planner::ExecutionState> state;
    std::mutex running;
  };

  void InstanceLoop(Instance& instance);
  // Whether a batch of `batch` that arrives now is best run by the thread that brings it.
  bool IsQuick(int64_t batch, int64_t arrival_nanos);
  // Runs the request in this thread if an instance is idle and nothing waits; false if not.
  bool RunAtOnce(InferRequest* request);
  // Runs and answers the batch, without those of its requests that nobody waits for any more.
  void Execute(planner::ExecutionState& state, Batch& batch);
  void DropAbandoned(Batch& batch, int64_t now_nanos);
  absl::Status Run(planner::ExecutionState& state, int64_t items);
  // Brings the inputs of a batch into the state, and says where outputs go, without the requests that fail in that, which are
  // answered. `anywhere`: the device itself copies from and to memory that has an address for it.
  void PlaceTensors(planner::ExecutionState& state, Batch& batch, bool anywhere);
  absl::Status PlaceInputs(planner::ExecutionState& state, const InferRequest& request,
                           int64_t first_item, bool anywhere) const;
  void PlaceOutputs(planner::ExecutionState& state, InferRequest& request,
                    int64_t first_item) const;
  // Whether an output has a NaN or an infinity where no input has.
  bool IsNonfinite(planner::ExecutionState& state, int64_t items) const;
  // Zeros behind the last item, up to what is executed.
  void PadInputs(planner::ExecutionState& state, int64_t items, int64_t executed_items) const;
  absl::Status CopyOutputs(const planner::ExecutionState& state, InferRequest& request,
                           int64_t first_item) const;
  // Counts and answers a request that was executed, or was not.
  void Complete(Outcome outcome);
  void Complete(InferRequest* request, Refusal refusal);
  void Answer(InferRequest* request, absl::Status status, int64_t total_nanos);

  Options options_;
  const Signature signature_;
  const BatchingPolicy policy_;
  const formats::ModelSettings settings_;
  VersionStatistics statistics_;
  std::atomic<bool> watches_outputs_{false};
  std::atomic<uint64_t> nonfinite_batches_{0};
  ArrivalGap arrival_gap_;
  std::unique_ptr<AnswerOrder> order_;  // null: answers leave as they come
  Batcher batcher_;
  std::vector<std::unique_ptr<Instance>> instances_;
  std::vector<std::thread> threads_;
};

using VersionHandle = std::shared_ptr<ServedVersion>;

}  // namespace espalier::runtime
