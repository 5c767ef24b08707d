// infer_call.h — one ModelInfer: the gRPC reactor and the runtime's request in one object.
#pragma once

#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"
#include "service/infer_task.h"
#include "service/rpc_scope.h"

namespace espalier::service {

class InferCall final : public grpc::ServerUnaryReactor, public InferTask {
 public:
  // Deletes itself when gRPC is done with it. `response` lives until then.
  InferCall(ServiceState& state, grpc::CallbackServerContext& context, grpc::ByteBuffer& response);

 private:
  ~InferCall() override = default;
  void Deliver(absl::Status status) override;
  void OnCancel() override { Cancel(); }
  void OnDone() override { delete this; }

  RpcScope scope_;
  grpc::CallbackServerContext& context_;
  grpc::ByteBuffer& response_;
};

}  // namespace espalier::service
