#include "service/inference_service.h"

#include "absl/strings/str_cat.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "service/infer_call.h"
#include "service/model_messages.h"
#include "service/rpc_scope.h"

namespace espalier::service {
namespace {

using grpc::CallbackServerContext;
using grpc::ServerUnaryReactor;

// What clients may rely on; perf_analyzer acts on "statistics".
constexpr const char* kExtensions[] = {"binary_tensor_data", "model_configuration", "statistics"};

absl::Status NotOffered(Rpc rpc) {
  return absl::UnimplementedError(absl::StrCat(NameOf(rpc), " is not offered by this server"));
}

// Ends a stream at once.
class RefusedStream final : public grpc::ServerBidiReactor<inference::ModelInferRequest,
                                                           inference::ModelStreamInferResponse> {
 public:
  explicit RefusedStream(grpc::Status status) { Finish(std::move(status)); }
  void OnDone() override { delete this; }
};

using Base = inference::GRPCInferenceService::WithRawCallbackMethod_ModelInfer<
    inference::GRPCInferenceService::CallbackService>;

class InferenceService final : public Base {
 public:
  explicit InferenceService(ServiceState& state) : state_(state) {}

  using Base::ModelInfer;  // the parsed form, which is never called
  ServerUnaryReactor* ModelInfer(CallbackServerContext* context, const grpc::ByteBuffer* request,
                                 grpc::ByteBuffer* response) override {
    auto* call = new InferCall(state_, *context, *request, *response);
    call->Begin();
    return call;
  }

  grpc::ServerBidiReactor<inference::ModelInferRequest, inference::ModelStreamInferResponse>*
  ModelStreamInfer(CallbackServerContext* context) override {
    return new RefusedStream(RpcScope(state_.telemetry, *context, Rpc::kModelStreamInfer)
                                 .End(NotOffered(Rpc::kModelStreamInfer)));
  }

  ServerUnaryReactor* ServerLive(CallbackServerContext* context,
                                 const inference::ServerLiveRequest*,
                                 inference::ServerLiveResponse* response) override {
    RpcScope scope(state_.telemetry, *context, Rpc::kServerLive);
    response->set_live(true);
    return scope.Finish(absl::OkStatus());
  }

  ServerUnaryReactor* ServerReady(CallbackServerContext* context,
                                  const inference::ServerReadyRequest*,
                                  inference::ServerReadyResponse* response) override {
    RpcScope scope(state_.telemetry, *context, Rpc::kServerReady);
    response->set_ready(state_.ready());
    return scope.Finish(absl::OkStatus());
  }

  // OK with false also for models that do not exist: clients raise on any error.
  ServerUnaryReactor* ModelReady(CallbackServerContext* context,
                                 const inference::ModelReadyRequest* request,
                                 inference::ModelReadyResponse* response) override {
    RpcScope scope(state_.telemetry, *context, Rpc::kModelReady);
    auto found = state_.models.Find(request->name(), request->version());
    response->set_ready(found.ok() && !state_.draining.load(std::memory_order_relaxed));
    return scope.Finish(absl::IsInvalidArgument(found.status()) ? found.status()
                                                                : absl::OkStatus());
  }

  ServerUnaryReactor* ServerMetadata(CallbackServerContext* context,
                                     const inference::ServerMetadataRequest*,
                                     inference::ServerMetadataResponse* response) override {
    RpcScope scope(state_.telemetry, *context, Rpc::kServerMetadata);
    response->set_name("espalier");
    response->set_version(ESPALIER_VERSION);
    for (const char* extension : kExtensions) response->add_extensions(extension);
    return scope.Finish(absl::OkStatus());
  }

  ServerUnaryReactor* ModelMetadata(CallbackServerContext* context,
                                    const inference::ModelMetadataRequest* request,
                                    inference::ModelMetadataResponse* response) override {
    RpcScope scope(state_.telemetry, *context, Rpc::kModelMetadata);
    auto found = state_.models.Find(request->name(), request->version());
    if (found.ok()) FillMetadata(**found, state_.models.ReadyVersions(request->name()), response);
    return scope.Finish(found.status());
  }

  ServerUnaryReactor* ModelConfig(CallbackServerContext* context,
                                  const inference::ModelConfigRequest* request,
                                  inference::ModelConfigResponse* response) override {
    RpcScope scope(state_.telemetry, *context, Rpc::kModelConfig);
    auto found = state_.models.Find(request->name(), request->version());
    if (found.ok()) *response->mutable_config() = (*found)->config();
    return scope.Finish(found.status());
  }

  ServerUnaryReactor* ModelStatistics(CallbackServerContext* context,
                                      const inference::ModelStatisticsRequest* request,
                                      inference::ModelStatisticsResponse* response) override {
    RpcScope scope(state_.telemetry, *context, Rpc::kModelStatistics);
    auto versions = state_.models.Select(request->name(), request->version());
    if (!versions.ok())
      return scope.Finish(
          absl::InvalidArgumentError(versions.status().message()));  // as Triton does
    for (const runtime::VersionHandle& version : *versions)
      FillStatistics(*version, response->add_model_stats());
    return scope.Finish(absl::OkStatus());
  }

  ServerUnaryReactor* RepositoryIndex(CallbackServerContext* context,
                                      const inference::RepositoryIndexRequest* request,
                                      inference::RepositoryIndexResponse* response) override {
    RpcScope scope(state_.telemetry, *context, Rpc::kRepositoryIndex);
    if (!request->repository_name().empty()) {
      return scope.Finish(
          absl::UnimplementedError("'repository_name' specification is not supported"));
    }
    for (const auto& entry : state_.models.Index()) {
      if (!request->ready() || entry.state == runtime::VersionState::kReady)
        FillIndex(entry, response->add_models());
    }
    return scope.Finish(absl::OkStatus());
  }

#define ESPALIER_REFUSE(name)                                                                   \
  ServerUnaryReactor* name(CallbackServerContext* context, const inference::name##Request*,     \
                           inference::name##Response*) override {                               \
    return RpcScope(state_.telemetry, *context, Rpc::k##name).Finish(NotOffered(Rpc::k##name)); \
  }
  ESPALIER_REFUSED_RPCS(ESPALIER_REFUSE)
#undef ESPALIER_REFUSE

 private:
  ServiceState& state_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeInferenceService(ServiceState& state) {
  return std::make_unique<InferenceService>(state);
}

}  // namespace espalier::service
