#include "clients/bench/request_source.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <array>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "clients/cpp/infer_message.h"

namespace espalier::bench {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using inference::ModelInferResponse;
using inference::ModelStreamInferResponse;

constexpr uint32_t LengthDelimited(int field) {
  return WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
}

// Reads up to the id: what follows, the tensors, is of no interest and often large.
bool ReadId(CodedInputStream& stream, AnswerFacts& facts) {
  while (const uint32_t tag = stream.ReadTag()) {
    if (tag != LengthDelimited(ModelInferResponse::kIdFieldNumber)) {
      if (!WireFormatLite::SkipField(&stream, tag)) return false;
      continue;
    }
    std::string id;
    if (!WireFormatLite::ReadBytes(&stream, &id)) return false;
    facts.has_id = absl::SimpleAtoi(id, &facts.id);
    return true;
  }
  return stream.ConsumedEntireMessage();
}

bool ReadStreamed(CodedInputStream& stream, AnswerFacts& facts) {
  while (const uint32_t tag = stream.ReadTag()) {
    if (tag == LengthDelimited(ModelStreamInferResponse::kErrorMessageFieldNumber)) {
      if (!WireFormatLite::ReadBytes(&stream, &facts.error)) return false;
    } else if (tag == LengthDelimited(ModelStreamInferResponse::kInferResponseFieldNumber)) {
      uint32_t length = 0;
      if (!stream.ReadVarint32(&length)) return false;
      const auto limit = stream.PushLimit(static_cast<int>(length));
      if (!ReadId(stream, facts)) return false;
      const int left = stream.BytesUntilLimit();
      if (left > 0 && !stream.Skip(left)) return false;
      stream.PopLimit(limit);
    } else if (!WireFormatLite::SkipField(&stream, tag)) {
      return false;
    }
  }
  return true;
}

}  // namespace

absl::StatusOr<RequestSource> RequestSource::Create(
    const std::vector<client::InferRequest>& requests, const SharedTensors* shared) {
  if (requests.empty()) return absl::InvalidArgumentError("expected a request to send, got none");
  RequestSource source;
  for (size_t i = 0; i < requests.size(); ++i) {
    inference::ModelInferRequest message;
    if (absl::Status status = client::ToMessage(requests[i], &message); !status.ok()) return status;
    if (shared != nullptr) shared->Refer(i, message);
    message.clear_id();
    source.messages_.emplace_back(message.SerializeAsString());
  }
  return source;
}

size_t RequestSource::bytes() const {
  size_t bytes = 0;
  for (const grpc::Slice& message : messages_) bytes += message.size();
  return bytes;
}

grpc::ByteBuffer RequestSource::Message(uint64_t sequence) const {
  const std::string id = absl::StrCat(sequence);  // at most 20 digits: its length is one byte
  const char tag = static_cast<char>(LengthDelimited(inference::ModelInferRequest::kIdFieldNumber));
  const std::array<grpc::Slice, 2> slices = {
      messages_[sequence % messages_.size()],
      grpc::Slice(
          absl::StrCat(std::string(1, tag), std::string(1, static_cast<char>(id.size())), id))};
  return grpc::ByteBuffer(slices.data(), slices.size());
}

AnswerFacts ReadAnswer(grpc::ByteBuffer& answer, bool streamed) {
  AnswerFacts facts;
  grpc::ProtoBufferReader reader(&answer);
  if (!reader.status().ok()) return facts;
  CodedInputStream stream(&reader);
  facts.readable = streamed ? ReadStreamed(stream, facts) : ReadId(stream, facts);
  return facts;
}

}  // namespace espalier::bench
