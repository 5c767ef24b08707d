#include "engine/runtime/served_version.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "engine/formats/model_settings.h"
#include "engine/runtime/log.h"
#include "engine/runtime/overload.h"
#include "engine/runtime/thread_priority.h"

namespace espalier::runtime {
namespace {

// A run this short is done in the thread that brings the request, if an instance is idle: waking the
// instance's thread, and that one waking gRPC's to send the answer, takes about as long again (one
// image through the MNIST models, 3 µs of computing: 43 µs above a bare echo with the two hand-overs).
constexpr int64_t kQuickNanos = 50'000;

// Of float elements: whether all are finite. Anything else is.
bool AllFinite(DType dtype, const void* elements, size_t bytes) {
  const auto all = [&]<typename Bits>(Bits exponent) {
    const auto* bits = static_cast<const Bits*>(elements);
    for (size_t i = 0; i < bytes / sizeof(Bits); ++i) {
      if ((bits[i] & exponent) == exponent) return false;
    }
    return true;
  };
  switch (dtype) {
    case DType::kFloat16:
      return all(uint16_t{0x7c00});
    case DType::kBFloat16:
      return all(uint16_t{0x7f80});
    case DType::kFloat32:
      return all(uint32_t{0x7f800000});
    case DType::kFloat64:
      return all(uint64_t{0x7ff0000000000000});
    default:
      return true;
  }
}

// The counts were checked when the config was read.
int InstanceCount(const inference::ModelConfig& config, const planner::PreparedModel& model) {
  if (model.instances() > 0) return model.instances();
  int count = 0;
  for (const auto& group : config.instance_group()) count += std::max(group.count(), 1);
  return std::max(count, 1);
}

}  // namespace

ServedVersion::ServedVersion(Options options, Signature signature, BatchingPolicy policy,
                             const formats::ModelSettings& settings)
    : options_(std::move(options)),
      signature_(std::move(signature)),
      policy_(std::move(policy)),
      settings_(settings),
      statistics_(signature_.max_batch_size),
      batcher_(policy_, [this](InferRequest* request, Refusal refusal) {
        Complete(request, std::move(refusal));
      }) {
  if (policy_.preserves_order) {
    order_ =
        std::make_unique<AnswerOrder>([this](Outcome outcome) { Complete(std::move(outcome)); });
  }
}

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
  auto policy = BatchingPolicy::Create(options.config, options.default_max_pending);
  if (!policy.ok()) return policy.status();
  std::unique_ptr<ServedVersion> version(
      new ServedVersion(std::move(options), *std::move(signature), *std::move(policy), *settings));
  if (absl::Status status = version->StartInstances(); !status.ok()) return status;
  return version;
}

absl::Status ServedVersion::StartInstances() {
  const int count = InstanceCount(options_.config, *options_.model);
  for (int i = 0; i < count; ++i) {
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

ServedVersion::~ServedVersion() { StopInstances(); }

void ServedVersion::StopInstances() {
  batcher_.Close();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  instances_.clear();
}

std::unique_ptr<planner::PreparedModel> ServedVersion::TakeModel(
    std::unique_ptr<ServedVersion> version) {
  version->StopInstances();
  return std::move(version->options_.model);
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

void ServedVersion::Submit(InferRequest* request) {
  NoteRequest(request->arrival_nanos);
  absl::Status status = BindRequest(signature_, *request);
  if (status.ok()) status = request->PlaceOutputs();
  if (!status.ok()) return Refuse(request, std::move(status));
  if (request->batch > policy_.largest_request()) {
    return Refuse(
        request,
        absl::InvalidArgumentError(absl::StrCat(
            "inference request batch-size must be <= ", policy_.largest_request(), " for '", name(),
            "', the largest of its allowed batch sizes, got ", request->batch)));
  }
  if (IsQuick(request->batch, request->arrival_nanos) && RunAtOnce(request)) return;
  Refusal refusal = batcher_.Push(request);
  if (refusal.status.ok()) return;  // it is the batcher's now, and may be answered already
  Complete(request, std::move(refusal));
}

bool ServedVersion::IsQuick(int64_t batch, int64_t arrival_nanos) {
  const int64_t gap = arrival_gap_.Note(arrival_nanos);
  if (!policy_.runs_at_once() || order_ != nullptr) return false;
  const VersionStatistics::Execution& runs = statistics_.by_batch_size()[batch];
  const uint64_t count = runs.count.load(std::memory_order_relaxed);
  if (count == 0) return false;
  const int64_t mean =
      static_cast<int64_t>(runs.infer_nanos.load(std::memory_order_relaxed) / count);
  // When runs one by one would fill half of the time, they are better queued: instances then find
  // several and run them for little more than one. (A model of 3 µs never comes near that: gRPC
  // takes twenty times as long to bring the next request.)
  return mean <= kQuickNanos && mean <= gap / 2;
}

bool ServedVersion::RunAtOnce(InferRequest* request) {
  if (batcher_.pending() > 0) return false;  // those came first
  for (auto& instance : instances_) {
    std::unique_lock lock(instance->running, std::try_to_lock);
    if (!lock.owns_lock()) continue;
    Batch batch{.requests = {request}, .items = request->batch};
    Execute(*instance->state, batch);
    return true;
  }
  return false;
}

void ServedVersion::InstanceLoop(Instance& instance) {
  Batch batch;
  while (batcher_.Next(batch)) {
    const std::lock_guard lock(instance.running);
    Execute(*instance.state, batch);
  }
}

absl::Status ServedVersion::Run(planner::ExecutionState& state, int64_t items) {
  if (settings_.execute_delay_millis > 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(settings_.execute_delay_millis));
  const int64_t executed = policy_.padded(items);
  if (executed > items) {
    PadInputs(state, items, executed);
    statistics_.padding_items.fetch_add(static_cast<uint64_t>(executed - items),
                                        std::memory_order_relaxed);
  }
  return options_.model->Run(state, executed);
}

void ServedVersion::DropAbandoned(Batch& batch, int64_t now) {
  const auto abandoned = [&](InferRequest* request) {
    Refusal refusal = Abandoned(*request, now);
    if (refusal.status.ok()) return false;
    batch.items -= request->batch;
    Complete(request, std::move(refusal));
    return true;
  };
  batch.requests.erase(std::remove_if(batch.requests.begin(), batch.requests.end(), abandoned),
                       batch.requests.end());
}

void ServedVersion::Execute(planner::ExecutionState& state, Batch& batch) {
  const int64_t started = NowNanos();
  DropAbandoned(batch, started);
  const bool watches = watches_outputs_.load(std::memory_order_relaxed);
  // What is watched is looked at, in the state's memory.
  PlaceTensors(state, batch, state.copies_anywhere() && !watches);
  std::vector<Outcome> held;
  if (!batch.requests.empty()) {
    const int64_t copied_in = NowNanos();
    const absl::Status ran = Run(state, batch.items);
    const int64_t ran_at = NowNanos();
    if (watches && ran.ok() && IsNonfinite(state, batch.items))
      nonfinite_batches_.fetch_add(1, std::memory_order_relaxed);
    batch.run_nanos = ran_at - copied_in;
    batch.waited_meanwhile = batcher_.pending();
    int64_t item = 0;
    for (InferRequest* request : batch.requests) {
      Outcome outcome = {request, ran.ok() ? CopyOutputs(state, *request, item) : ran};
      item += request->batch;
      request->executed = true;
      request->phases = {started - request->arrival_nanos, copied_in - started, ran_at - copied_in,
                         NowNanos() - ran_at};
      // Before the last answer, so that whoever has all answers also finds the execution counted.
      if (item == batch.items && ran.ok() && request->counted)
        statistics_.RecordExecution(item, request->phases);
      if (order_ != nullptr) {
        held.push_back(std::move(outcome));
      } else {
        Complete(std::move(outcome));
      }
    }
  }
  if (order_ != nullptr) order_->Release(batch.sequence, std::move(held));
}

void ServedVersion::PlaceTensors(planner::ExecutionState& state, Batch& batch, bool anywhere) {
  batch.items = 0;
  const auto fails = [&](InferRequest* request) {
    absl::Status status = PlaceInputs(state, *request, batch.items, anywhere);
    if (!status.ok()) {
      Complete({request, std::move(status)});
      return true;
    }
    if (anywhere) PlaceOutputs(state, *request, batch.items);
    batch.items += request->batch;
    return false;
  };
  batch.requests.erase(std::remove_if(batch.requests.begin(), batch.requests.end(), fails),
                       batch.requests.end());
}

absl::Status ServedVersion::PlaceInputs(planner::ExecutionState& state, const InferRequest& request,
                                        int64_t first_item, bool anywhere) const {
  const auto offset = [&](size_t i) {
    return static_cast<size_t>(first_item) * signature_.inputs[i].item_bytes;
  };
  absl::InlinedVector<std::byte*, 4> elsewhere(signature_.inputs.size(), nullptr);
  for (size_t i = 0; i < signature_.inputs.size(); ++i) {
    const InputTensor& input = request.inputs[request.input_of[i]];
    std::byte* to = static_cast<std::byte*>(state.input(static_cast<int>(i))) + offset(i);
    for (const ByteSlice& slice : input.data) {
      std::memcpy(to, slice.data, slice.size);
      to += slice.size;
    }
    const TensorRange& range = input.range;
    if (range.memory == nullptr) continue;
    if (anywhere) elsewhere[i] = range.memory->DeviceAddress(range.offset, range.bytes);
    if (elsewhere[i] != nullptr) continue;
    absl::Status status = range.memory->Read(range.offset, {to, range.bytes});
    if (!status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat("input '", input.name, "': ", status.message(),
                                       ", for model '", name(), "'"));
    }
  }
  // Not before all are there: the request that fails must leave nothing behind.
  for (size_t i = 0; i < elsewhere.size(); ++i) {
    if (elsewhere[i] == nullptr) continue;
    state.ReadFrom(static_cast<int>(i), offset(i), request.inputs[request.input_of[i]].range.bytes,
                   elsewhere[i]);
  }
  return absl::OkStatus();
}

void ServedVersion::PlaceOutputs(planner::ExecutionState& state, InferRequest& request,
                                 int64_t first_item) const {
  for (OutputTensor& output : request.outputs) {
    const TensorRange& range = output.range;
    if (range.memory == nullptr) continue;
    std::byte* const to = range.memory->DeviceAddress(range.offset, output.bytes);
    if (to == nullptr) continue;
    output.in_place = true;
    state.WriteTo(output.index,
                  static_cast<size_t>(first_item) * signature_.outputs[output.index].item_bytes,
                  output.bytes, to);
  }
}

bool ServedVersion::IsNonfinite(planner::ExecutionState& state, int64_t items) const {
  const auto finite = [&](const TensorSpec& spec, const void* elements) {
    return AllFinite(spec.dtype, elements, static_cast<size_t>(items) * spec.item_bytes);
  };
  bool nonfinite = false;
  for (size_t i = 0; i < signature_.outputs.size(); ++i)
    nonfinite = nonfinite || !finite(signature_.outputs[i], state.output(static_cast<int>(i)));
  for (size_t i = 0; nonfinite && i < signature_.inputs.size(); ++i)
    nonfinite = finite(signature_.inputs[i], state.input(static_cast<int>(i)));
  return nonfinite;
}

void ServedVersion::PadInputs(planner::ExecutionState& state, int64_t items,
                              int64_t executed_items) const {
  for (size_t i = 0; i < signature_.inputs.size(); ++i) {
    const size_t item_bytes = signature_.inputs[i].item_bytes;
    std::memset(static_cast<std::byte*>(state.input(static_cast<int>(i))) +
                    static_cast<size_t>(items) * item_bytes,
                0, static_cast<size_t>(executed_items - items) * item_bytes);
  }
}

absl::Status ServedVersion::CopyOutputs(const planner::ExecutionState& state, InferRequest& request,
                                        int64_t first_item) const {
  absl::InlinedVector<const std::byte*, 4> from;
  for (const OutputTensor& output : request.outputs) {
    from.push_back(static_cast<const std::byte*>(state.output(output.index)) +
                   static_cast<size_t>(first_item) * signature_.outputs[output.index].item_bytes);
    const TensorRange& range = output.range;
    if (range.memory == nullptr || output.in_place) continue;
    absl::Status status = range.memory->Write(range.offset, {from.back(), output.bytes});
    if (!status.ok()) return status;
  }
  return request.TakeOutputs(from);
}

void ServedVersion::Complete(Outcome outcome) {
  InferRequest* request = outcome.request;
  const int64_t total = NowNanos() - request->arrival_nanos;
  if (!request->counted) {
    // nothing to count
  } else if (outcome.status.ok()) {
    statistics_.RecordSuccess(total, request->batch, request->phases);
  } else {
    statistics_.RecordFailure(outcome.status.code(), ReasonOf(outcome.status.code()), total);
  }
  for (int i = 0; i < kPhases && request->counted; ++i)
    options_.latency->phases[i].Observe(request->phases[i]);
  Answer(request, std::move(outcome.status), total);
}

void ServedVersion::Complete(InferRequest* request, Refusal refusal) {
  const int64_t total = NowNanos() - request->arrival_nanos;
  const absl::StatusCode code =
      IsOverload(refusal.status) ? options_.overload_code : refusal.status.code();
  if (request->counted) statistics_.RecordFailure(code, refusal.reason, total);
  Answer(request, std::move(refusal.status), total);
}

void ServedVersion::Answer(InferRequest* request, absl::Status status, int64_t total_nanos) {
  if (request->counted) options_.latency->request.Observe(total_nanos);
  // The pin goes first, so that a version whose requests are all answered is held by nobody but its
  // manager. From here on neither the request nor (when this thread is not an instance's) the
  // version may be touched.
  request->version.reset();
  request->Answer(std::move(status));
}

}  // namespace espalier::runtime
