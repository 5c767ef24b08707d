// infer_task.h — one ModelInferRequest from its message to its answer, whichever RPC brought it.
//
//   callback thread   Begin ──▶ decode ──▶ find version ──▶ Submit
//   instance's thread                          TakeOutputs ──▶ Answer
//
// Nothing here waits. The message's slices are held until the task is gone, because the runtime
// copies tensors straight from them; the response is one slice, into which the outputs are copied.
#pragma once

#include <string>
#include <vector>

#include "engine/runtime/infer_request.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "service/infer_decoder.h"
#include "service/infer_encoder.h"
#include "service/service_state.h"

namespace espalier::service {

// Whoever derives from it implements Answer: the task is counted as in flight until it is gone.
class InferTask : public runtime::InferRequest {
 public:
  // Answers at once when the request is faulty, else hands it to the model.
  void Begin(const grpc::ByteBuffer& message);

  absl::Status TakeOutputs(absl::Span<const std::byte* const> from) override;

 protected:
  InferTask(ServiceState& state, Envelope envelope) : state_(state), envelope_(envelope) {}
  ~InferTask() override;

  // As the client sent it; empty until the message was read.
  const std::string& id() const { return id_; }
  // The message that answers a request that went well.
  grpc::ByteBuffer Response() const { return grpc::ByteBuffer(&response_slice_, 1); }

 private:
  absl::Status Admit(int64_t message_bytes);
  absl::Status Decode(const grpc::ByteBuffer& message, DecodedRequest* request);
  // Moves the decoded tensors into the runtime's request.
  absl::Status TakeInputs(DecodedRequest& request, const std::string& model);
  // The data of an input that has none in raw_input_contents.
  absl::StatusOr<runtime::ByteSlices> TypedData(const DecodedInput& input, bool has_raw);
  absl::Status TakeRequestedOutputs(const DecodedRequest& request);

  ServiceState& state_;
  const Envelope envelope_;
  int64_t admitted_bytes_ = -1;      // -1: not admitted
  std::vector<grpc::Slice> slices_;  // of the message
  std::vector<std::string> typed_;   // raw form of typed contents
  std::string id_;
  grpc::Slice response_slice_;
};

}  // namespace espalier::service
