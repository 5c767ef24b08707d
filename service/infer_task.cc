#include "service/infer_task.h"

#include <grpc/slice.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "absl/strings/str_cat.h"
#include "engine/runtime/model_manager.h"
#include "engine/runtime/overload.h"
#include "service/rpc_scope.h"
#include "service/status.h"
#include "service/typed_contents.h"

namespace espalier::service {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;

// What no protobuf parser takes.
constexpr size_t kMaxResponseBytes = std::numeric_limits<int32_t>::max();
// Up to here gRPC's own allocation, one block with its reference count, is good enough; it aborts
// without memory.
constexpr size_t kSmallResponseBytes = size_t{1} << 20;

absl::StatusOr<grpc::Slice> AllocateSlice(size_t bytes) {
  // grpc_slice_malloc would put the bytes of a short slice into the handle itself, and they would
  // move with it.
  if (bytes <= kSmallResponseBytes)
    return grpc::Slice(grpc_slice_malloc_large(bytes), grpc::Slice::STEAL_REF);
  void* memory = std::malloc(bytes);
  if (memory == nullptr)
    return absl::ResourceExhaustedError(StrCat("no memory for a response of ", bytes, " bytes"));
  return grpc::Slice(memory, bytes, std::free);
}

// How long until what waits for the model will have run, as far as its past tells.
int64_t RetryAfterMillis(const runtime::ServedVersion* version) {
  constexpr int64_t kUnknown = 100, kLeast = 10, kMost = 60'000;
  if (version == nullptr) return kUnknown;
  const runtime::VersionStatistics& past = version->statistics();
  const uint64_t executions = past.executions.load(std::memory_order_relaxed);
  const uint64_t requests = past.success.count.load(std::memory_order_relaxed);
  if (executions == 0 || requests == 0) return kUnknown;
  uint64_t nanos = 0;
  for (int phase = static_cast<int>(runtime::Phase::kComputeInput); phase < runtime::kPhases;
       ++phase) {
    nanos += past.phases[phase].nanos.load(std::memory_order_relaxed);
  }
  // The requests of a batch each count its whole time.
  const double execution_millis = static_cast<double>(nanos) * 1e-6 / static_cast<double>(requests);
  const double waiting_executions = static_cast<double>(version->pending()) *
                                    static_cast<double>(executions) / static_cast<double>(requests);
  const double millis = waiting_executions * execution_millis / version->instances();
  return std::clamp(static_cast<int64_t>(std::min(millis, 1e9)), kLeast, kMost);
}

}  // namespace

InferTask::~InferTask() {
  if (admitted_bytes_ >= 0) state_.telemetry.in_flight.Leave(admitted_bytes_);
}

absl::Status InferTask::Admit(int64_t message_bytes) {
  if (state_.draining.load(std::memory_order_relaxed))
    return absl::UnavailableError("server is shutting down");
  absl::Status status = state_.telemetry.in_flight.Enter(message_bytes);
  if (status.ok()) admitted_bytes_ = message_bytes;
  return status;
}

absl::Status InferTask::Decode(const grpc::ByteBuffer& message, DecodedRequest* request) {
  if (!message.Valid()) return NoMessage(deadline_nanos);
  if (!message.Dump(&slices_).ok())
    return InvalidArgumentError("malformed ModelInferRequest: message cannot be unpacked");
  absl::InlinedVector<runtime::ByteSlice, 8> pieces;
  pieces.reserve(slices_.size());
  for (const grpc::Slice& slice : slices_) {
    pieces.push_back({reinterpret_cast<const std::byte*>(slice.begin()), slice.size()});
  }
  return DecodeInferRequest(pieces, request);
}

void InferTask::Begin(const grpc::ByteBuffer& message) {
  DecodedRequest request;
  absl::Status status = Admit(static_cast<int64_t>(message.Length()));
  if (status.ok()) status = Decode(message, &request);
  if (!status.ok()) return Answer(std::move(status));
  id_ = std::move(request.id);
  auto found = state_.models.Find(request.model_name, request.model_version);
  if (!found.ok()) return Answer(found.status());
  const runtime::VersionHandle model = *std::move(found);  // held until Submit has returned
  version = model;
  model_name_ = std::move(request.model_name);
  if (const uint64_t traced = state_.tracer.Sample(model_name_); traced != 0)
    trace_ = std::make_unique<Trace>(Trace{traced, model->version(), runtime::NowNanos()});
  timeout_micros = request.timeout_micros;
  priority = request.priority;
  if (!request.parameter_error.empty()) status = InvalidArgumentError(request.parameter_error);
  if (status.ok()) status = TakeInputs(request);
  if (status.ok()) status = TakeRequestedOutputs(request);
  if (!status.ok()) return model->Refuse(this, std::move(status));
  model->Submit(this);
}

void InferTask::Answer(absl::Status status) {
  if (runtime::IsOverload(status)) status = AskToRetry(status);
  if (trace_ != nullptr) RecordTrace(status);
  // Once a client has its answers, its regions are its own again: what it unregisters then is closed when it is told so.
  targets_.clear();
  for (auto& input : inputs) input.range.memory.reset();
  for (auto& output : outputs) output.range.memory.reset();
  Deliver(std::move(status));
}

absl::Status InferTask::AskToRetry(const absl::Status& overload) {
  const auto found = state_.models.Find(model_name_, "");
  retry_after_millis_ = RetryAfterMillis(found.ok() ? found->get() : nullptr);
  if (state_.overload_code == overload.code()) return overload;
  return absl::Status(state_.overload_code,
                      StrCat(overload.message(), "; retry after ", retry_after_millis_, " ms"));
}

void InferTask::RecordTrace(const absl::Status& status) {
  TraceRecord record{trace_->id, model_name_, trace_->version, id_,
                     CodeName(static_cast<int>(status.code()))};
  record.stamps = {{"REQUEST_START", arrival_nanos}, {"QUEUE_START", trace_->queued_nanos}};
  if (executed) {
    // In the order in which they follow each other.
    constexpr const char* kEnds[] = {"COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START",
                                     "COMPUTE_END"};
    int64_t at = arrival_nanos;
    for (int phase = 0; phase < runtime::kPhases; ++phase) {
      at += phases[phase];
      record.stamps.push_back({kEnds[phase], at});
    }
  }
  record.stamps.push_back({"REQUEST_END", runtime::NowNanos()});
  state_.tracer.Record(std::move(record));
}

absl::Status InferTask::TakeInputs(DecodedRequest& request) {
  const std::string& model = version->name();
  const bool raw = !request.raw_inputs.empty();
  const auto in_message = static_cast<size_t>(
      std::count_if(request.inputs.begin(), request.inputs.end(),
                    [](const DecodedInput& input) { return input.shared_memory.region.empty(); }));
  if (raw && request.raw_inputs.size() != in_message) {
    return InvalidArgumentError(
        StrCat("expected ", in_message, " raw_input_contents, one per input",
               in_message < request.inputs.size() ? " that is not in shared memory" : "", ", got ",
               request.raw_inputs.size(), ", for model '", model, "'"));
  }
  inputs.reserve(request.inputs.size());
  if (!raw) typed_.reserve(in_message);  // slices point into its strings, which must not move
  size_t next_raw = 0;
  for (DecodedInput& input : request.inputs) {
    runtime::InputTensor& tensor = inputs.emplace_back();
    absl::Status status;
    if (!input.shared_memory.region.empty()) {
      status = TakeShared(input, tensor.range);
    } else if (raw && !input.has_contents) {
      tensor.data = std::move(request.raw_inputs[next_raw++]);
    } else {
      status = TakeTyped(input, raw, tensor.data);
    }
    if (!status.ok())
      return absl::Status(status.code(), StrCat(status.message(), ", for model '", model, "'"));
    tensor.name = std::move(input.name);
    tensor.datatype = std::move(input.datatype);
    tensor.shape = std::move(input.shape);
  }
  return absl::OkStatus();
}

absl::Status InferTask::TakeTyped(const DecodedInput& input, bool has_raw,
                                  runtime::ByteSlices& data) {
  const std::string name = runtime::Printable(input.name);
  if (has_raw) {
    return InvalidArgumentError(
        StrCat("contents field must not be specified when using raw_input_contents for input '",
               name, "'"));
  }
  if (!input.has_contents) {
    return InvalidArgumentError(StrCat("unable to find data for input tensor '", name,
                                       "': neither raw_input_contents nor contents is set"));
  }
  auto elements = ElementCount(input.shape);
  if (!elements.ok())
    return InvalidArgumentError(StrCat("input '", name, "': ", elements.status().message()));
  auto bytes = RawElements(input, *elements);
  if (!bytes.ok()) return bytes.status();
  typed_.push_back(*std::move(bytes));
  data = {{reinterpret_cast<const std::byte*>(typed_.back().data()), typed_.back().size()}};
  return absl::OkStatus();
}

absl::Status InferTask::TakeShared(const DecodedInput& input, runtime::TensorRange& range) const {
  const auto refuse = [&](const absl::Status& status) {
    return absl::Status(status.code(),
                        StrCat("input '", runtime::Printable(input.name), "': ", status.message()));
  };
  if (input.has_contents)
    return refuse(InvalidArgumentError("contents is set beside shared memory"));
  auto region = state_.shared_memory.Find(input.shared_memory.region);
  if (!region.ok()) return refuse(region.status());
  range.offset = static_cast<uint64_t>(input.shared_memory.offset);
  range.bytes = static_cast<size_t>(input.shared_memory.byte_size);
  absl::Status status = (*region)->CheckRange(range.offset, range.bytes);
  if (!status.ok()) return refuse(status);
  range.memory = *std::move(region);
  return absl::OkStatus();
}

absl::Status InferTask::TakeRequestedOutputs(DecodedRequest& request) {
  requested_outputs.reserve(request.outputs.size());
  for (DecodedOutput& output : request.outputs) {
    if (absl::Status status = TakeTarget(output); !status.ok()) {
      return absl::Status(status.code(), StrCat("output '", runtime::Printable(output.name),
                                                "': ", status.message()));
    }
    requested_outputs.push_back(std::move(output.name));
  }
  return absl::OkStatus();
}

absl::Status InferTask::TakeTarget(const DecodedOutput& output) {
  const bool shared = !output.shared_memory.region.empty();
  if (!shared && output.classification == 0 && targets_.empty()) return absl::OkStatus();
  targets_.resize(requested_outputs.size() + 1);
  Target& target = targets_.back();
  target.classification = output.classification;
  if (!shared) return absl::OkStatus();
  target.range = output.shared_memory;
  auto region = state_.shared_memory.Find(target.range.region);
  if (!region.ok()) return region.status();
  target.region = *std::move(region);
  return target.region->CheckRange(static_cast<uint64_t>(target.range.offset),
                                   static_cast<uint64_t>(target.range.byte_size));
}

absl::Status InferTask::Redirect(const Target& target, const runtime::OutputTensor& output,
                                 ResponseOutput& part, const std::byte*& from,
                                 Classes& classes) const {
  const runtime::Signature& signature = version->signature();
  if (output.range.memory != nullptr) {
    part.shared_memory = &target.range;
    part.bytes = 0;
    return absl::OkStatus();
  }
  if (target.classification == 0) return absl::OkStatus();
  const runtime::TensorSpec& spec = signature.outputs[output.index];
  auto best = BestClasses(spec.dtype, output.shape, signature.max_batch_size > 0, from,
                          target.classification, version->labels(output.index));
  if (!best.ok()) {
    return absl::Status(best.status().code(),
                        StrCat("output '", part.name, "': ", best.status().message()));
  }
  classes = *std::move(best);
  part.datatype = NameOf(DType::kBytes);
  part.shape = classes.shape;
  part.bytes = classes.bytes.size();
  from = reinterpret_cast<const std::byte*>(classes.bytes.data());
  return absl::OkStatus();
}

absl::Status InferTask::PlaceOutputs() {
  for (size_t i = 0; i < targets_.size(); ++i) {
    if (targets_[i].region == nullptr) continue;
    const auto room = static_cast<size_t>(targets_[i].range.byte_size);
    if (outputs[i].bytes > room) {
      return InvalidArgumentError(
          StrCat("output '", version->signature().outputs[outputs[i].index].name, "' takes ",
                 outputs[i].bytes, " bytes, but shared_memory_byte_size is ", room));
    }
    outputs[i].range = {std::move(targets_[i].region),
                        static_cast<uint64_t>(targets_[i].range.offset), room};
  }
  return absl::OkStatus();
}

absl::Status InferTask::TakeOutputs(absl::Span<const std::byte* const> from) {
  const runtime::Signature& signature = version->signature();
  absl::InlinedVector<ResponseOutput, 4> parts;
  absl::InlinedVector<const std::byte*, 4> sources(from.begin(), from.end());
  std::vector<Classes> classes(targets_.empty() ? 0 : outputs.size());
  targets_.resize(classes.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const runtime::OutputTensor& output = outputs[i];
    const runtime::TensorSpec& spec = signature.outputs[output.index];
    parts.push_back({spec.name, NameOf(spec.dtype), output.shape, output.bytes});
    if (targets_.empty()) continue;
    absl::Status status = Redirect(targets_[i], output, parts.back(), sources[i], classes[i]);
    if (!status.ok()) return status;
  }
  InferResponse response(signature.model, version->version(), id_, absl::MakeSpan(parts),
                         envelope_);
  if (response.bytes() > kMaxResponseBytes) {
    return absl::ResourceExhaustedError(StrCat("the response would have ", response.bytes(),
                                               " bytes, at most ", kMaxResponseBytes,
                                               " fit a message; send smaller batches"));
  }
  auto slice = AllocateSlice(response.bytes());
  if (!slice.ok()) return slice.status();
  response_slice_ = *std::move(slice);
  response.Write(reinterpret_cast<std::byte*>(const_cast<uint8_t*>(response_slice_.begin())));
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].bytes > 0) std::memcpy(parts[i].data, sources[i], parts[i].bytes);
  }
  return absl::OkStatus();
}

}  // namespace espalier::service
