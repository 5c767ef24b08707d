#include "service/infer_call.h"

namespace espalier::service {

InferCall::InferCall(ServiceState& state, grpc::CallbackServerContext& context,
                     grpc::ByteBuffer& response)
    : InferTask(state, Envelope::kUnary),
      scope_(state.telemetry, context, Rpc::kModelInfer),
      response_(response) {
  arrival_nanos = scope_.arrival_nanos();
  deadline_nanos = scope_.deadline_nanos();
}

void InferCall::Answer(absl::Status status) {
  if (status.ok()) response_ = Response();
  ServerUnaryReactor::Finish(scope_.End(status));
}

}  // namespace espalier::service
