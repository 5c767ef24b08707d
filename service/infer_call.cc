#include "service/infer_call.h"

#include "absl/strings/str_cat.h"

namespace espalier::service {

InferCall::InferCall(ServiceState& state, grpc::CallbackServerContext& context,
                     grpc::ByteBuffer& response)
    : InferTask(state, Envelope::kUnary),
      scope_(state.telemetry, context, Rpc::kModelInfer),
      context_(context),
      response_(response) {
  arrival_nanos = scope_.arrival_nanos();
  deadline_nanos = scope_.deadline_nanos();
}

void InferCall::Deliver(absl::Status status) {
  if (status.ok()) response_ = Response();
  if (retry_after_millis() > 0) {
    const std::string millis = absl::StrCat(retry_after_millis());
    context_.AddTrailingMetadata("retry-after-ms", millis);
    // What gRPC's own retries obey.
    context_.AddTrailingMetadata("grpc-retry-pushback-ms", millis);
  }
  ServerUnaryReactor::Finish(scope_.End(status));
}

}  // namespace espalier::service
