#include "service/infer_task.h"

#include <grpc/slice.h>

#include <cstdlib>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "engine/runtime/model_manager.h"
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
  if (!message.Dump(&slices_).ok())
    return InvalidArgumentError("malformed ModelInferRequest: message cannot be unpacked");
  std::vector<runtime::ByteSlice> pieces;
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
  timeout_micros = request.timeout_micros;
  if (!request.parameter_error.empty()) status = InvalidArgumentError(request.parameter_error);
  if (status.ok()) status = TakeInputs(request, model->name());
  if (status.ok()) status = TakeRequestedOutputs(request);
  if (!status.ok()) return model->Refuse(this, std::move(status));
  model->Submit(this);
}

absl::Status InferTask::TakeInputs(DecodedRequest& request, const std::string& model) {
  const bool raw = !request.raw_inputs.empty();
  if (raw && request.raw_inputs.size() != request.inputs.size()) {
    return InvalidArgumentError(StrCat("expected ", request.inputs.size(),
                                       " raw_input_contents, one per input, got ",
                                       request.raw_inputs.size(), ", for model '", model, "'"));
  }
  inputs.reserve(request.inputs.size());
  typed_.reserve(request.inputs.size());  // slices point into its strings, which must not move
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    DecodedInput& input = request.inputs[i];
    auto data = raw && !input.has_contents && !input.in_shared_memory
                    ? absl::StatusOr<runtime::ByteSlices>(std::move(request.raw_inputs[i]))
                    : TypedData(input, raw);
    if (!data.ok())
      return absl::Status(data.status().code(),
                          StrCat(data.status().message(), ", for model '", model, "'"));
    inputs.push_back({std::move(input.name), std::move(input.datatype), std::move(input.shape),
                      *std::move(data)});
  }
  return absl::OkStatus();
}

absl::StatusOr<runtime::ByteSlices> InferTask::TypedData(const DecodedInput& input, bool has_raw) {
  const std::string name = runtime::Printable(input.name);
  if (input.in_shared_memory) {
    return absl::UnimplementedError(
        StrCat("input '", name, "': this server takes no tensors from shared memory"));
  }
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
  return runtime::ByteSlices{
      {reinterpret_cast<const std::byte*>(typed_.back().data()), typed_.back().size()}};
}

absl::Status InferTask::TakeRequestedOutputs(const DecodedRequest& request) {
  requested_outputs.reserve(request.outputs.size());
  for (const DecodedOutput& output : request.outputs) {
    if (output.in_shared_memory || output.wants_classification) {
      return absl::UnimplementedError(
          StrCat("output '", runtime::Printable(output.name), "': this server does not offer ",
                 output.in_shared_memory ? "shared memory" : "the classification extension"));
    }
    requested_outputs.push_back(output.name);
  }
  return absl::OkStatus();
}

absl::Status InferTask::TakeOutputs(absl::Span<const std::byte* const> from) {
  const runtime::Signature& signature = version->signature();
  absl::InlinedVector<ResponseOutput, 4> parts;
  for (const runtime::OutputTensor& output : outputs) {
    const runtime::TensorSpec& spec = signature.outputs[output.index];
    parts.push_back({spec.name, NameOf(spec.dtype), output.shape, output.bytes});
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
  for (size_t i = 0; i < parts.size(); ++i) std::memcpy(parts[i].data, from[i], parts[i].bytes);
  return absl::OkStatus();
}

}  // namespace espalier::service
