// request_source.h — requests as they travel, made once: sending one costs no copy of its tensors.
//
//   RequestSource source = *RequestSource::Create(requests);
//   grpc::ByteBuffer message = source.Message(sequence);  // the requests in turn, id = sequence
//   AnswerFacts facts = ReadAnswer(answer, /*streamed=*/false);
//
// Memory   The serialized requests, shared by all messages made of them. A message is the request's
//          slice and one more with its id: a protobuf message is the concatenation of its fields.
// Thread-safe: all of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "clients/bench/shared_tensors.h"
#include "clients/cpp/client.h"
#include "grpcpp/support/byte_buffer.h"

namespace espalier::bench {

class RequestSource {
 public:
  // At least one request; their ids are ignored. `shared`, if not null, has their tensors, and outlives every message.
  // InvalidArgument for one that contradicts itself.
  static absl::StatusOr<RequestSource> Create(const std::vector<client::InferRequest>& requests,
                                              const SharedTensors* shared = nullptr);

  grpc::ByteBuffer Message(uint64_t sequence) const;
  size_t size() const { return messages_.size(); }
  size_t bytes() const;  // of all requests

 private:
  std::vector<grpc::Slice> messages_;
};

// What the ledger needs of an answer.
struct AnswerFacts {
  bool readable = false;  // it is a protobuf message at least as far as its id
  bool has_id = false;
  uint64_t id = 0;
  std::string error;  // of a streamed answer
};

// Of a ModelInferResponse, or of the ModelStreamInferResponse around one.
AnswerFacts ReadAnswer(grpc::ByteBuffer& answer, bool streamed);

}  // namespace espalier::bench
