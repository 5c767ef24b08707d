#include "service/infer_encoder.h"

#include <cstring>

#include "absl/strings/str_cat.h"

namespace espalier::service {
namespace {

// Field numbers of proto/inference/grpc_service.proto.
enum ResponseField {
  kModelName = 1,
  kModelVersion = 2,
  kId = 3,
  kParameters = 4,
  kOutputs = 5,
  kRawOutputs = 6
};
enum StreamField { kErrorMessage = 1, kInferResponse = 2 };
enum OutputField { kName = 1, kDatatype = 2, kShape = 3, kOutputParameters = 4 };
enum MapField { kKey = 1, kValue = 2 };
enum ParameterField { kInt64Param = 2, kStringParam = 3 };

// A map entry: "triton_final_response" (field 1) is InferParameter (field 2) {bool_param (1): true}.
constexpr absl::string_view kFinalResponse(
    "\x0a\x15"
    "triton_final_response"
    "\x12\x02\x08\x01",
    27);

size_t VarintBytes(uint64_t value) {
  size_t bytes = 1;
  for (; value >= 0x80; value >>= 7) ++bytes;
  return bytes;
}

// A length-delimited field with a number below 16, whose tag is one byte.
size_t FieldBytes(size_t length) { return 1 + VarintBytes(length) + length; }
size_t StringBytes(absl::string_view text) { return text.empty() ? 0 : FieldBytes(text.size()); }

size_t ShapeBytes(absl::Span<const int64_t> shape) {
  size_t bytes = 0;
  for (const int64_t dim : shape) bytes += VarintBytes(static_cast<uint64_t>(dim));
  return bytes;
}

// A parameter of an output that lies in shared memory, as clients of Triton expect them.
struct Parameter {
  absl::string_view key;
  absl::string_view text;  // empty: `number` counts
  int64_t number = 0;

  size_t ValueBytes() const {
    return text.empty() ? 1 + VarintBytes(static_cast<uint64_t>(number)) : StringBytes(text);
  }
  size_t EntryBytes() const { return StringBytes(key) + FieldBytes(ValueBytes()); }
};

absl::InlinedVector<Parameter, 3> ParametersOf(const SharedMemoryRange* range) {
  if (range == nullptr) return {};
  absl::InlinedVector<Parameter, 3> parameters = {
      {"shared_memory_region", range->region}, {"shared_memory_byte_size", {}, range->byte_size}};
  if (range->offset > 0) parameters.push_back({"shared_memory_offset", {}, range->offset});
  return parameters;
}

size_t OutputBytes(const ResponseOutput& output) {
  size_t bytes = StringBytes(output.name) + StringBytes(output.datatype);
  if (!output.shape.empty()) bytes += FieldBytes(ShapeBytes(output.shape));
  for (const Parameter& parameter : ParametersOf(output.shared_memory)) {
    bytes += FieldBytes(parameter.EntryBytes());
  }
  return bytes;
}

class Writer {
 public:
  explicit Writer(std::byte* to) : to_(to) {}

  void Varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) *to_++ = static_cast<std::byte>(value | 0x80);
    *to_++ = static_cast<std::byte>(value);
  }
  void Begin(uint32_t field, size_t length) {
    Varint(field << 3 | 2);
    Varint(length);
  }
  void String(uint32_t field, absl::string_view text) {
    if (text.empty()) return;
    Begin(field, text.size());
    std::memcpy(Reserve(text.size()), text.data(), text.size());
  }
  std::byte* Reserve(size_t bytes) {
    std::byte* place = to_;
    to_ += bytes;
    return place;
  }

 private:
  std::byte* to_;
};

void WriteParameter(Writer& writer, const Parameter& parameter) {
  writer.Begin(kOutputParameters, parameter.EntryBytes());
  writer.String(kKey, parameter.key);
  writer.Begin(kValue, parameter.ValueBytes());
  if (!parameter.text.empty()) return writer.String(kStringParam, parameter.text);
  writer.Varint(kInt64Param << 3);
  writer.Varint(static_cast<uint64_t>(parameter.number));
}

}  // namespace

InferResponse::InferResponse(absl::string_view model, int64_t version, absl::string_view id,
                             absl::Span<ResponseOutput> outputs, Envelope envelope)
    : model_(model),
      version_(absl::StrCat(version)),
      id_(id),
      outputs_(outputs),
      envelope_(envelope) {
  response_bytes_ = StringBytes(model_) + StringBytes(version_) + StringBytes(id_);
  if (envelope_ == Envelope::kStream) response_bytes_ += StringBytes(kFinalResponse);
  for (const ResponseOutput& output : outputs_) {
    response_bytes_ += FieldBytes(OutputBytes(output)) + FieldBytes(output.bytes);
  }
  bytes_ = envelope_ == Envelope::kStream ? FieldBytes(response_bytes_) : response_bytes_;
}

void InferResponse::Write(std::byte* to) {
  Writer writer(to);
  if (envelope_ == Envelope::kStream) writer.Begin(kInferResponse, response_bytes_);
  writer.String(kModelName, model_);
  writer.String(kModelVersion, version_);
  writer.String(kId, id_);
  if (envelope_ == Envelope::kStream) writer.String(kParameters, kFinalResponse);
  for (const ResponseOutput& output : outputs_) {
    writer.Begin(kOutputs, OutputBytes(output));
    writer.String(kName, output.name);
    writer.String(kDatatype, output.datatype);
    if (!output.shape.empty()) writer.Begin(kShape, ShapeBytes(output.shape));
    for (const int64_t dim : output.shape) writer.Varint(static_cast<uint64_t>(dim));
    for (const Parameter& parameter : ParametersOf(output.shared_memory)) {
      WriteParameter(writer, parameter);
    }
  }
  for (ResponseOutput& output : outputs_) {
    writer.Begin(kRawOutputs, output.bytes);
    output.data = writer.Reserve(output.bytes);
  }
}

std::string StreamError(absl::string_view id, absl::string_view message) {
  const size_t response_bytes = StringBytes(id) + StringBytes(kFinalResponse);
  std::string bytes(StringBytes(message) + FieldBytes(response_bytes), '\0');
  Writer writer(reinterpret_cast<std::byte*>(bytes.data()));
  writer.String(kErrorMessage, message);
  writer.Begin(kInferResponse, response_bytes);
  writer.String(kId, id);
  writer.String(kParameters, kFinalResponse);
  return bytes;
}

}  // namespace espalier::service
