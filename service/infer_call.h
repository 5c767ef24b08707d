// infer_call.h — one ModelInfer from its message to its answer: the gRPC reactor and the runtime's
// request in one object.
//
//   callback thread   ModelInfer ──▶ decode ──▶ find version ──▶ Submit
//   instance's thread                            AllocateOutputs ──▶ Answer ──▶ OnDone
//
// Nothing here waits. The message's slices are held until OnDone, because the runtime copies
// tensors straight from them; the response is one slice, into which the runtime copies the outputs.
#pragma once

#include <string>
#include <vector>

#include "engine/runtime/infer_request.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "service/infer_decoder.h"
#include "service/rpc_scope.h"
#include "service/service_state.h"

namespace espalier::service {

class InferCall final : public grpc::ServerUnaryReactor, public runtime::InferRequest {
 public:
  // Deletes itself when gRPC is done with it. `message` and `response` live until then.
  InferCall(ServiceState& state, grpc::CallbackServerContext& context,
            const grpc::ByteBuffer& message, grpc::ByteBuffer& response);

  // Answers at once when the request is faulty, else hands it to the model.
  void Begin();

  absl::Status AllocateOutputs() override;
  void Answer(absl::Status status) override;

 private:
  ~InferCall() override;
  void OnCancel() override { Cancel(); }
  void OnDone() override { delete this; }

  absl::Status Admit();
  absl::Status Decode(DecodedRequest* request);
  // Moves the decoded tensors into the runtime's request.
  absl::Status TakeInputs(DecodedRequest& request, const std::string& model);
  // The data of an input that has none in raw_input_contents.
  absl::StatusOr<runtime::ByteSlices> TypedData(const DecodedInput& input, bool has_raw);
  absl::Status TakeOutputs(const DecodedRequest& request);

  ServiceState& state_;
  RpcScope scope_;
  const grpc::ByteBuffer& message_;
  grpc::ByteBuffer& response_;
  const int64_t message_bytes_;
  bool admitted_ = false;
  std::vector<grpc::Slice> slices_;  // of the message
  std::vector<std::string> typed_;   // raw form of typed contents
  std::string id_;
  grpc::Slice response_slice_;
};

}  // namespace espalier::service
