#include "service/infer_encoder.h"

#include <cstring>

#include "absl/strings/str_cat.h"

namespace espalier::service {
namespace {

// Field numbers of proto/inference/grpc_service.proto.
enum ResponseField { kModelName = 1, kModelVersion = 2, kId = 3, kOutputs = 5, kRawOutputs = 6 };
enum OutputField { kName = 1, kDatatype = 2, kShape = 3 };

size_t VarintBytes(uint64_t value) {
  size_t bytes = 1;
  for (; value >= 0x80; value >>= 7) ++bytes;
  return bytes;
}

// A length-delimited field with a number below 16, whose tag is one byte.
size_t FieldBytes(size_t length) { return 1 + VarintBytes(length) + length; }
size_t StringBytes(absl::string_view text) { return text.empty() ? 0 : FieldBytes(text.size()); }

size_t ShapeBytes(const Shape& shape) {
  size_t bytes = 0;
  for (const int64_t dim : shape) bytes += VarintBytes(static_cast<uint64_t>(dim));
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

}  // namespace

InferResponse::InferResponse(const runtime::Signature& signature, int64_t version,
                             absl::string_view id, std::vector<runtime::OutputTensor>& outputs)
    : signature_(signature), version_(absl::StrCat(version)), id_(id), outputs_(outputs) {
  bytes_ = StringBytes(signature_.model) + StringBytes(version_) + StringBytes(id_);
  for (const runtime::OutputTensor& output : outputs_) {
    bytes_ += FieldBytes(OutputBytes(output)) + FieldBytes(output.bytes);
  }
}

size_t InferResponse::OutputBytes(const runtime::OutputTensor& output) const {
  const runtime::TensorSpec& spec = signature_.outputs[output.index];
  const size_t shape = output.shape.empty() ? 0 : FieldBytes(ShapeBytes(output.shape));
  return StringBytes(spec.name) + StringBytes(NameOf(spec.dtype)) + shape;
}

void InferResponse::Write(std::byte* to) {
  Writer writer(to);
  writer.String(kModelName, signature_.model);
  writer.String(kModelVersion, version_);
  writer.String(kId, id_);
  for (const runtime::OutputTensor& output : outputs_) {
    const runtime::TensorSpec& spec = signature_.outputs[output.index];
    writer.Begin(kOutputs, OutputBytes(output));
    writer.String(kName, spec.name);
    writer.String(kDatatype, NameOf(spec.dtype));
    if (output.shape.empty()) continue;
    writer.Begin(kShape, ShapeBytes(output.shape));
    for (const int64_t dim : output.shape) writer.Varint(static_cast<uint64_t>(dim));
  }
  for (runtime::OutputTensor& output : outputs_) {
    writer.Begin(kRawOutputs, output.bytes);
    output.data = writer.Reserve(output.bytes);
  }
}

}  // namespace espalier::service
