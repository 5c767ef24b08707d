#include "engine/runtime/served_version.h"

#include <pthread.h>

#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "engine/formats/model_settings.h"
#include "engine/runtime/log.h"

namespace espalier::runtime {
namespace {

// A run this short is done in the thread that brings the request, if an instance is idle: waking the
// instance's thread, and that one waking gRPC's to send the answer, takes about as long again (one
// image through the MNIST models, 3 µs of computing: 43 µs above a bare echo with the two hand-overs).
constexpr uint64_t kQuickNanos = 50'000;

// The counts were checked when the config was read.
absl::StatusOr<int> InstanceCount(const inference::ModelConfig& config, const std::string& name) {
  int count = 0;
  for (const auto& group : config.instance_group()) {
    if (group.kind() == inference::ModelInstanceGroup::KIND_GPU) {
      return absl::InvalidArgumentError(
          absl::StrCat("model '", name, "': instance_group kind KIND_GPU is not available on this ",
                       "server; use KIND_CPU or KIND_AUTO"));
    }
    count += std::max(group.count(), 1);
  }
  return std::max(count, 1);
}

// Why a request that waited must not be executed any more; OK if it may.
absl::Status Admissible(const InferRequest& request, int64_t now) {
  if (request.cancelled())
    return absl::CancelledError("request was cancelled while it waited; it was not executed");
  if (now >= request.deadline_nanos) {
    return absl::DeadlineExceededError(
        "deadline passed while the request waited; it was not executed");
  }
  if (now >= request.queue_deadline_nanos) {
    return absl::UnavailableError(absl::StrCat(
        "Request timeout expired: waited ", (now - request.arrival_nanos) / 1000,
        " microseconds, allowed ", (request.queue_deadline_nanos - request.arrival_nanos) / 1000));
  }
  return absl::OkStatus();
}

}  // namespace

ServedVersion::QueuePolicy ServedVersion::PolicyOf(const Options& options) {
  QueuePolicy policy{.max_pending = options.default_max_pending};
  if (!options.config.has_dynamic_batching()) return policy;
  const auto& from = options.config.dynamic_batching().default_queue_policy();
  if (from.max_queue_size() > 0) policy.max_pending = from.max_queue_size();
  // A timeout beyond a day is none, and its nanoseconds would overflow.
  constexpr uint64_t kDayMicros = 86'400'000'000;
  policy.default_timeout_micros = from.default_timeout_microseconds() > kDayMicros
                                      ? 0
                                      : static_cast<int64_t>(from.default_timeout_microseconds());
  policy.allow_timeout_override = from.allow_timeout_override();
  policy.rejects_expired = from.timeout_action() == inference::ModelQueuePolicy::REJECT;
  return policy;
}

ServedVersion::ServedVersion(Options options, Signature signature, QueuePolicy policy,
                             int64_t execute_delay_millis)
    : options_(std::move(options)),
      signature_(std::move(signature)),
      policy_(policy),
      execute_delay_millis_(execute_delay_millis),
      statistics_(signature_.max_batch_size),
      queue_(policy_.max_pending) {}

absl::StatusOr<std::unique_ptr<ServedVersion>> ServedVersion::Create(Options options) {
  auto signature = Signature::Create(options.name, options.config.max_batch_size(),
                                     options.model->inputs(), options.model->outputs());
  if (!signature.ok()) return signature.status();
  auto settings = formats::ReadModelSettings(options.config);
  if (!settings.ok()) return settings.status();
  if (settings->execute_delay_millis > 0) {
    LogEvent(spdlog::level::warn, "every execution is delayed, as the model's config asks",
             {{"model", options.name},
              {"version", options.version},
              {"execute_delay_ms", settings->execute_delay_millis}});
  }
  const QueuePolicy policy = PolicyOf(options);
  std::unique_ptr<ServedVersion> version(new ServedVersion(
      std::move(options), *std::move(signature), policy, settings->execute_delay_millis));
  if (absl::Status status = version->StartInstances(); !status.ok()) return status;
  return version;
}

absl::Status ServedVersion::StartInstances() {
  auto count = InstanceCount(options_.config, name());
  if (!count.ok()) return count.status();
  for (int i = 0; i < *count; ++i) {
    auto state = options_.model->NewState();
    if (!state.ok()) return state.status();
    instances_.push_back(std::make_unique<Instance>());
    instances_.back()->state = *std::move(state);
  }
  for (auto& instance : instances_) {
    threads_.emplace_back([this, &instance = *instance] { InstanceLoop(instance); });
    // Linux shows 15 characters of a thread's name.
    pthread_setname_np(threads_.back().native_handle(),
                       absl::StrCat("run ", name()).substr(0, 15).c_str());
  }
  return absl::OkStatus();
}

ServedVersion::~ServedVersion() {
  queue_.Close();
  for (std::thread& thread : threads_) thread.join();
}

absl::Span<const std::string> ServedVersion::labels(int index) const {
  const auto found = options_.labels.find(signature_.outputs[index].name);
  return found == options_.labels.end() ? absl::Span<const std::string>() : found->second;
}

size_t ServedVersion::arena_bytes() const {
  size_t bytes = 0;
  for (const auto& instance : instances_) bytes += instance->state->arena_bytes();
  return bytes;
}

int64_t ServedVersion::QueueDeadline(const InferRequest& request) const {
  int64_t micros = policy_.default_timeout_micros;
  if (policy_.allow_timeout_override && request.timeout_micros > 0) {
    micros = micros > 0 ? std::min(micros, request.timeout_micros) : request.timeout_micros;
  }
  return micros == 0 || !policy_.rejects_expired ? INT64_MAX
                                                 : request.arrival_nanos + micros * 1000;
}

void ServedVersion::Submit(InferRequest* request) {
  absl::Status status = BindRequest(signature_, *request);
  if (status.ok()) {
    request->queue_deadline_nanos = QueueDeadline(*request);
    if (IsQuick(request->batch) && RunAtOnce(request)) return;
    status = queue_.Push(request);
    if (status.ok()) return;  // it is the instance's now, and may be answered already
  }
  Complete(request, std::move(status), nullptr);
}

bool ServedVersion::IsQuick(int64_t batch) const {
  const VersionStatistics::Execution& runs = statistics_.by_batch_size()[batch];
  const uint64_t count = runs.count.load(std::memory_order_relaxed);
  return count > 0 && runs.infer_nanos.load(std::memory_order_relaxed) / count <= kQuickNanos;
}

bool ServedVersion::RunAtOnce(InferRequest* request) {
  if (queue_.pending() > 0) return false;  // those came first
  for (auto& instance : instances_) {
    std::unique_lock lock(instance->running, std::try_to_lock);
    if (!lock.owns_lock()) continue;
    Execute(*instance->state, {request});
    return true;
  }
  return false;
}

void ServedVersion::InstanceLoop(Instance& instance) {
  while (InferRequest* request = queue_.Pop()) {
    const std::lock_guard lock(instance.running);
    absl::Status status = Admissible(*request, NowNanos());
    if (status.ok()) {
      Execute(*instance.state, {request});
    } else {
      Complete(request, std::move(status), nullptr);
    }
  }
}

void ServedVersion::Execute(planner::ExecutionState& state, absl::Span<InferRequest* const> batch) {
  const int64_t started = NowNanos();
  int64_t items = 0;
  for (const InferRequest* request : batch) {
    CopyInputs(state, *request, items);
    items += request->batch;
  }
  const int64_t copied_in = NowNanos();
  if (execute_delay_millis_ > 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(execute_delay_millis_));
  const absl::Status ran = options_.model->Run(state, items);
  int64_t done = NowNanos();
  PhaseNanos phases = {0, copied_in - started, done - copied_in, 0};
  const int64_t ran_at = done;
  int64_t first_item = 0;
  for (InferRequest* request : batch) {
    const int64_t items_of_request = request->batch;
    const absl::Status status = ran.ok() ? CopyOutputs(state, *request, first_item) : ran;
    first_item += items_of_request;
    done = NowNanos();
    phases[static_cast<int>(Phase::kQueue)] = started - request->arrival_nanos;
    phases[static_cast<int>(Phase::kComputeOutput)] = done - ran_at;
    // Before the last answer, so that whoever has all answers also finds the execution counted.
    if (first_item == items && ran.ok()) statistics_.RecordExecution(items, phases);
    Complete(request, status, &phases);
  }
}

void ServedVersion::CopyInputs(planner::ExecutionState& state, const InferRequest& request,
                               int64_t first_item) const {
  for (size_t i = 0; i < signature_.inputs.size(); ++i) {
    std::byte* to = static_cast<std::byte*>(state.input(static_cast<int>(i))) +
                    static_cast<size_t>(first_item) * signature_.inputs[i].item_bytes;
    for (const ByteSlice& slice : request.inputs[request.input_of[i]].data) {
      std::memcpy(to, slice.data, slice.size);
      to += slice.size;
    }
  }
}

absl::Status ServedVersion::CopyOutputs(const planner::ExecutionState& state, InferRequest& request,
                                        int64_t first_item) const {
  absl::InlinedVector<const std::byte*, 4> from;
  for (const OutputTensor& output : request.outputs) {
    from.push_back(static_cast<const std::byte*>(state.output(output.index)) +
                   static_cast<size_t>(first_item) * signature_.outputs[output.index].item_bytes);
  }
  return request.TakeOutputs(from);
}

void ServedVersion::Complete(InferRequest* request, absl::Status status, const PhaseNanos* phases,
                             std::optional<FailureReason> reason) {
  const int64_t total = NowNanos() - request->arrival_nanos;
  if (status.ok()) {
    statistics_.RecordSuccess(total, request->batch, *phases);
  } else {
    statistics_.RecordFailure(status.code(), reason.value_or(ReasonOf(status.code())), total);
  }
  options_.latency->request.Observe(total);
  for (int i = 0; phases != nullptr && i < kPhases; ++i)
    options_.latency->phases[i].Observe((*phases)[i]);
  // The pin goes first, so that a version whose requests are all answered is held by nobody but its
  // manager. From here on neither the request nor (when this thread is not an instance's) the
  // version may be touched.
  request->version.reset();
  request->executed = phases != nullptr;
  if (phases != nullptr) request->phases = *phases;
  request->Answer(std::move(status));
}

}  // namespace espalier::runtime
