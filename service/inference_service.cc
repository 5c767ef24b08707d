#include "service/inference_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/generic/async_generic_service.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "service/infer_call.h"
#include "service/infer_stream.h"
#include "service/log_settings.h"
#include "service/model_messages.h"
#include "service/repository_control.h"
#include "service/rpc_scope.h"

namespace espalier::service {
namespace {

using grpc::CallbackServerContext;
using grpc::ServerUnaryReactor;

// What clients may rely on; perf_analyzer acts on "statistics".
constexpr const char* kExtensions[] = {
    "binary_tensor_data",  "classification",   "logging",
    "model_configuration", "model_repository", "model_repository(unload_dependents)",
    "statistics",
};

constexpr std::pair<SharedMemoryKind, const char*> kSharedMemoryExtensions[] = {
    {SharedMemoryKind::kSystem, "system_shared_memory"},
    {SharedMemoryKind::kCuda, "cuda_shared_memory"},
};

// All methods are taken as raw messages: a message that cannot be parsed would otherwise be
// answered by gRPC itself, with a code that means something else and without a text.
using grpc::ByteBuffer;
using Methods = inference::GRPCInferenceService;
using RawInfer = Methods::WithRawCallbackMethod_ModelInfer<
    Methods::WithRawCallbackMethod_ModelStreamInfer<Methods::Service>>;
#define ESPALIER_RAW(name) Methods::WithRawCallbackMethod_##name <
#define ESPALIER_CLOSE(name) >
using Base = ESPALIER_OFFERED_RPCS(ESPALIER_RAW) ESPALIER_REPOSITORY_RPCS(ESPALIER_RAW) RawInfer
    ESPALIER_REPOSITORY_RPCS(ESPALIER_CLOSE) ESPALIER_OFFERED_RPCS(ESPALIER_CLOSE);
#undef ESPALIER_RAW
#undef ESPALIER_CLOSE

class InferenceService final : public Base {
 public:
  explicit InferenceService(ServiceState& state) : state_(state), repository_(state) {}

  using Base::ModelInfer;  // the parsed form, which is never called
  ServerUnaryReactor* ModelInfer(CallbackServerContext* context, const ByteBuffer* request,
                                 ByteBuffer* response) override {
    auto* call = new InferCall(state_, *context, *response);
    call->Begin(*request);
    return call;
  }

  grpc::ServerBidiReactor<ByteBuffer, ByteBuffer>* ModelStreamInfer(
      CallbackServerContext* context) override {
    return InferStream::Open(state_, *context);
  }

#define ESPALIER_SERVE(name)                                                                  \
  using Base::name;                                                                           \
  ServerUnaryReactor* name(CallbackServerContext* context, const ByteBuffer* request,         \
                           ByteBuffer* response) override {                                   \
    return Serve<inference::name##Request, inference::name##Response>(Rpc::k##name, *context, \
                                                                      *request, response);    \
  }
  ESPALIER_OFFERED_RPCS(ESPALIER_SERVE)
#undef ESPALIER_SERVE

#define ESPALIER_CONTROL(name)                                                        \
  using Base::name;                                                                   \
  ServerUnaryReactor* name(CallbackServerContext* context, const ByteBuffer* request, \
                           ByteBuffer* response) override {                           \
    return repository_.name(context, request, response);                              \
  }
  ESPALIER_REPOSITORY_RPCS(ESPALIER_CONTROL)
#undef ESPALIER_CONTROL

 private:
  // A unary RPC: parse, Handle, serialise.
  template <typename Request, typename Response>
  ServerUnaryReactor* Serve(Rpc rpc, CallbackServerContext& context, const ByteBuffer& message,
                            ByteBuffer* answer) {
    RpcScope scope(state_.telemetry, context, rpc);
    if (!message.Valid()) return scope.Finish(context, NoMessage(scope.deadline_nanos()));
    Request request;
    Response response;
    ByteBuffer copy(message);  // of the references; the parser consumes them
    if (!grpc::SerializationTraits<Request>::Deserialize(&copy, &request).ok()) {
      return scope.Finish(
          context, absl::InvalidArgumentError(absl::StrCat("malformed ", NameOf(rpc), "Request")));
    }
    const absl::Status status = Handle(request, &response);
    bool owned = false;
    if (status.ok() &&
        !grpc::SerializationTraits<Response>::Serialize(response, answer, &owned).ok()) {
      return scope.Finish(context, absl::InternalError(absl::StrCat(
                                       NameOf(rpc), ": the response cannot be written")));
    }
    return scope.Finish(context, status);
  }

  absl::Status Handle(const inference::ServerLiveRequest&,
                      inference::ServerLiveResponse* response) {
    response->set_live(true);
    return absl::OkStatus();
  }

  absl::Status Handle(const inference::ServerReadyRequest&,
                      inference::ServerReadyResponse* response) {
    response->set_ready(state_.ready());
    return absl::OkStatus();
  }

  // OK with false also for models that do not exist: clients raise on any error.
  absl::Status Handle(const inference::ModelReadyRequest& request,
                      inference::ModelReadyResponse* response) {
    const absl::Status found = state_.models.Find(request.name(), request.version()).status();
    response->set_ready(found.ok() && !state_.draining.load(std::memory_order_relaxed));
    return absl::IsInvalidArgument(found) ? found : absl::OkStatus();
  }

  absl::Status Handle(const inference::ServerMetadataRequest&,
                      inference::ServerMetadataResponse* response) {
    response->set_name("espalier");
    response->set_version(ESPALIER_VERSION);
    for (const char* extension : kExtensions) response->add_extensions(extension);
    for (const auto& [kind, extension] : kSharedMemoryExtensions) {
      if (state_.shared_memory.CheckOffered(kind).ok()) response->add_extensions(extension);
    }
    if (state_.tracer.allowed()) response->add_extensions("trace");
    return absl::OkStatus();
  }

  absl::Status Handle(const inference::ModelMetadataRequest& request,
                      inference::ModelMetadataResponse* response) {
    auto found = state_.models.Find(request.name(), request.version());
    if (!found.ok()) return found.status();
    FillMetadata(**found, state_.models.ReadyVersions(request.name()), response);
    return absl::OkStatus();
  }

  absl::Status Handle(const inference::ModelConfigRequest& request,
                      inference::ModelConfigResponse* response) {
    auto found = state_.models.Find(request.name(), request.version());
    if (!found.ok()) return found.status();
    *response->mutable_config() = (*found)->config();
    return absl::OkStatus();
  }

  absl::Status Handle(const inference::ModelStatisticsRequest& request,
                      inference::ModelStatisticsResponse* response) {
    auto versions = state_.models.Select(request.name(), request.version());
    // The code is Triton's.
    if (!versions.ok()) return absl::InvalidArgumentError(versions.status().message());
    for (const auto& version : *versions) FillStatistics(*version, response->add_model_stats());
    return absl::OkStatus();
  }

  absl::Status Handle(const inference::RepositoryIndexRequest& request,
                      inference::RepositoryIndexResponse* response) {
    if (!request.repository_name().empty()) {
      return absl::UnimplementedError("'repository_name' specification is not supported");
    }
    for (const auto& entry : state_.models.Index()) {
      if (request.ready() && entry.state != runtime::VersionState::kReady) continue;
      FillIndex(entry, response->add_models());
    }
    return absl::OkStatus();
  }

  absl::Status Handle(const inference::SystemSharedMemoryStatusRequest& request,
                      inference::SystemSharedMemoryStatusResponse* response) {
    auto regions = state_.shared_memory.List<SystemSharedMemory>(request.name());
    if (!regions.ok()) return regions.status();
    for (const auto& region : *regions) {
      auto& status = (*response->mutable_regions())[region->name()];
      status.set_name(region->name());
      status.set_key(region->key());
      status.set_offset(region->offset());
      status.set_byte_size(region->byte_size());
    }
    return absl::OkStatus();
  }

  absl::Status Handle(const inference::SystemSharedMemoryRegisterRequest& request,
                      inference::SystemSharedMemoryRegisterResponse*) {
    return state_.shared_memory.RegisterSystem(request.name(), request.key(), request.offset(),
                                               request.byte_size());
  }

  absl::Status Handle(const inference::SystemSharedMemoryUnregisterRequest& request,
                      inference::SystemSharedMemoryUnregisterResponse*) {
    return state_.shared_memory.Unregister(SharedMemoryKind::kSystem, request.name());
  }

  absl::Status Handle(const inference::CudaSharedMemoryStatusRequest& request,
                      inference::CudaSharedMemoryStatusResponse* response) {
    auto regions = state_.shared_memory.List<CudaSharedMemory>(request.name());
    if (!regions.ok()) return regions.status();
    for (const auto& region : *regions) {
      auto& status = (*response->mutable_regions())[region->name()];
      status.set_name(region->name());
      status.set_device_id(static_cast<uint64_t>(region->device_id()));
      status.set_byte_size(region->byte_size());
    }
    return absl::OkStatus();
  }

  absl::Status Handle(const inference::CudaSharedMemoryRegisterRequest& request,
                      inference::CudaSharedMemoryRegisterResponse*) {
    return state_.shared_memory.RegisterCuda(request.name(), request.raw_handle(),
                                             request.device_id(), request.byte_size());
  }

  absl::Status Handle(const inference::CudaSharedMemoryUnregisterRequest& request,
                      inference::CudaSharedMemoryUnregisterResponse*) {
    return state_.shared_memory.Unregister(SharedMemoryKind::kCuda, request.name());
  }

  absl::Status Handle(const inference::TraceSettingRequest& request,
                      inference::TraceSettingResponse* response) {
    const std::string& model = request.model_name();
    if (!model.empty()) {
      absl::Status known = state_.models.Find(model, "").status();
      if (!known.ok()) return known;
    }
    Tracer::Settings updates;
    for (const auto& [name, setting] : request.settings())
      updates[name].assign(setting.value().begin(), setting.value().end());
    absl::Status status = state_.tracer.Update(model, updates);
    if (!status.ok()) return status;
    for (const auto& [name, values] : state_.tracer.Get(model))
      (*response->mutable_settings())[name].mutable_value()->Add(values.begin(), values.end());
    return absl::OkStatus();
  }

  absl::Status Handle(const inference::LogSettingsRequest& request,
                      inference::LogSettingsResponse* response) {
    absl::Status status = UpdateLogSettings(request);
    if (status.ok()) FillLogSettings(response);
    return status;
  }

  ServiceState& state_;
  RepositoryControl repository_;
};

// Methods that nobody declared.
class UnknownMethods final : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    return new Refusal(absl::StrCat("method '", runtime::Printable(context->method()),
                                    "' is not offered by this server"));
  }

 private:
  class Refusal final : public grpc::ServerGenericBidiReactor {
   public:
    explicit Refusal(std::string text) {
      Finish(grpc::Status(grpc::StatusCode::UNIMPLEMENTED, std::move(text)));
    }
    void OnDone() override { delete this; }
  };
};

}  // namespace

std::unique_ptr<grpc::Service> MakeInferenceService(ServiceState& state) {
  return std::make_unique<InferenceService>(state);
}

std::unique_ptr<grpc::CallbackGenericService> MakeUnknownMethods() {
  return std::make_unique<UnknownMethods>();
}

}  // namespace espalier::service
