// served_version.h — one version of one model, resident and running: its instances, their queue,
// its statistics.
//
//   Submit ──▶ BindRequest ──▶ RequestQueue ──▶ instance 0 … N−1 ──▶ Answer
//                                               (a thread and an ExecutionState each)
//
// Immutable but for queue and statistics. Held through VersionHandle: a handle pins the version,
// every request holds one until it is answered, and the destructor (which joins the instances) runs
// on the thread that ModelManager chooses, never on an instance or a front end thread.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/formats/model_config.h"
#include "engine/planner/prepared_model.h"
#include "engine/runtime/infer_request.h"
#include "engine/runtime/labels.h"
#include "engine/runtime/request_queue.h"
#include "engine/runtime/signature.h"
#include "engine/runtime/statistics.h"

namespace espalier::runtime {

class ServedVersion {
 public:
  struct Options {
    std::string name;
    int64_t version = 0;
    inference::ModelConfig config;  // complete
    std::unique_ptr<const planner::PreparedModel> model;
    Labels labels;
    std::shared_ptr<ModelLatency> latency;  // shared by the versions of a model
    int64_t default_max_pending = 0;        // when the config sets no max_queue_size; 0: no limit
    double load_seconds = 0;                // reading, planning and preparing
  };

  // Makes the instances and starts their threads. InvalidArgument for a config that contradicts the
  // model or asks for what this build has not (a GPU instance), ResourceExhausted without memory.
  static absl::StatusOr<std::unique_ptr<ServedVersion>> Create(Options options);
  // Answers what is still queued, joins the instances, frees the model.
  ~ServedVersion();

  // Checks the request and queues it, or runs it at once when that is quick; it is answered through
  // Answer in every case, perhaps before Submit returns. `request->version` must be a handle of
  // this version; the caller holds another one while it calls.
  void Submit(InferRequest* request);
  // Answers a request that the front end found faulty, so that it is counted like those that Submit
  // refuses. Same terms.
  void Refuse(InferRequest* request, absl::Status status) {
    Complete(request, std::move(status), nullptr);
  }

  const std::string& name() const { return signature_.model; }
  int64_t version() const { return options_.version; }
  const Signature& signature() const { return signature_; }
  // With the plan in its parameters, see plan_parameters.h.
  const inference::ModelConfig& config() const { return options_.config; }
  const planner::PreparedModel& model() const { return *options_.model; }
  // Of the classes of output `index`; may be empty, or fewer than classes.
  absl::Span<const std::string> labels(int index) const;
  const VersionStatistics& statistics() const { return statistics_; }
  int64_t pending() const { return queue_.pending(); }
  // The same by priority level, from the highest (1); one level 0 for a model without levels.
  struct LevelPending {
    uint64_t level = 0;
    int64_t requests = 0;
  };
  std::vector<LevelPending> PendingByLevel() const { return {{0, pending()}}; }
  double load_seconds() const { return options_.load_seconds; }
  int instances() const { return static_cast<int>(instances_.size()); }
  size_t arena_bytes() const;  // of all instances

 private:
  // What the config says about waiting (Triton's default_queue_policy).
  struct QueuePolicy {
    int64_t max_pending = 0;
    int64_t default_timeout_micros = 0;  // 0: none
    bool allow_timeout_override = false;
    bool rejects_expired = true;
  };

  ServedVersion(Options options, Signature signature, QueuePolicy policy,
                int64_t execute_delay_millis);
  static QueuePolicy PolicyOf(const Options& options);
  absl::Status StartInstances();
  // Running and being run: the thread of the instance, or a caller of Submit that borrows it.
  struct Instance {
    std::unique_ptr<planner::ExecutionState> state;
    std::mutex running;
  };

  void InstanceLoop(Instance& instance);
  // Whether runs of `batch` items have been quick so far (kQuickNanos).
  bool IsQuick(int64_t batch) const;
  // Runs the request in this thread if an instance is idle and nothing waits; false if not.
  bool RunAtOnce(InferRequest* request);
  void Execute(planner::ExecutionState& state, absl::Span<InferRequest* const> batch);
  void CopyInputs(planner::ExecutionState& state, const InferRequest& request,
                  int64_t first_item) const;
  absl::Status CopyOutputs(const planner::ExecutionState& state, InferRequest& request,
                           int64_t first_item) const;
  int64_t QueueDeadline(const InferRequest& request) const;
  // Counts and answers. `phases` is null for a request that was not executed; without a `reason`,
  // the code of a bad status tells it.
  void Complete(InferRequest* request, absl::Status status, const PhaseNanos* phases,
                std::optional<FailureReason> reason = std::nullopt);

  Options options_;
  const Signature signature_;
  const QueuePolicy policy_;
  const int64_t execute_delay_millis_;
  VersionStatistics statistics_;
  RequestQueue queue_;
  std::vector<std::unique_ptr<Instance>> instances_;
  std::vector<std::thread> threads_;
};

using VersionHandle = std::shared_ptr<ServedVersion>;

}  // namespace espalier::runtime
