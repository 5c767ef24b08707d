#include "clients/cpp/client.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "clients/cpp/grpc_status.h"
#include "clients/cpp/infer_message.h"
#include "proto/inference/grpc_service.grpc.pb.h"

namespace espalier::client {
namespace {

using inference::GRPCInferenceService;

constexpr int kMaxMessageBytes = std::numeric_limits<int>::max();

}  // namespace

struct Client::Connection {
  ClientOptions options;
  std::unique_ptr<GRPCInferenceService::Stub> stub;

  void Prepare(grpc::ClientContext& context, const CallOptions& call) const {
    const absl::Duration deadline =
        call.deadline == absl::ZeroDuration() ? options.deadline : call.deadline;
    if (deadline != absl::InfiniteDuration())
      context.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
    context.set_wait_for_ready(call.wait_for_ready);
    for (const auto& [key, value] : options.headers) context.AddMetadata(key, value);
  }

  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(grpc::Status (GRPCInferenceService::Stub::*method)(
                                    grpc::ClientContext*, const Request&, Response*),
                                const Request& request, const CallOptions& call) const {
    grpc::ClientContext context;
    Prepare(context, call);
    Response response;
    if (absl::Status status = FromGrpc((*stub.*method)(&context, request, &response)); !status.ok())
      return status;
    return response;
  }
};

// Counts async calls, so that the client outlives them: the last reference to a gRPC 1.51 channel
// must not be dropped on the channel's own callback thread, where a call's context is released.
class Client::CallsInFlight {
 public:
  void Add() {
    absl::MutexLock lock(&mutex_);
    ++count_;
  }
  void Remove() {
    absl::MutexLock lock(&mutex_);
    --count_;
  }
  void AwaitNone() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](int* count) { return *count == 0; }, &count_));
  }

 private:
  absl::Mutex mutex_;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
};

absl::StatusOr<const Tensor*> InferResult::output(absl::string_view name) const {
  for (const Tensor& tensor : outputs) {
    if (tensor.name == name) return &tensor;
  }
  return absl::NotFoundError(absl::StrCat(
      "no output '", name, "'; the result has ",
      absl::StrJoin(outputs, ", ",
                    [](std::string* out, const Tensor& tensor) { out->append(tensor.name); })));
}

void PendingInfer::Cancel() { context_->TryCancel(); }

Client::Client(std::unique_ptr<Connection> connection)
    : connection_(std::move(connection)), calls_(std::make_shared<CallsInFlight>()) {}
Client::~Client() { calls_->AwaitNone(); }

absl::StatusOr<std::unique_ptr<Client>> Client::Create(const std::string& target,
                                                       ClientOptions options) {
  if (absl::Status status = CheckTarget(target, "127.0.0.1:8001"); !status.ok()) return status;
  grpc::ChannelArguments arguments;
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  auto connection = std::make_unique<Connection>();
  connection->options = std::move(options);
  auto credentials = connection->options.credentials ? connection->options.credentials
                                                     : grpc::InsecureChannelCredentials();
  connection->stub =
      GRPCInferenceService::NewStub(grpc::CreateCustomChannel(target, credentials, arguments));
  return std::unique_ptr<Client>(new Client(std::move(connection)));
}

absl::StatusOr<InferResult> Client::Infer(const InferRequest& request, const CallOptions& options) {
  inference::ModelInferRequest message;
  if (absl::Status status = ToMessage(request, &message); !status.ok()) return status;
  auto response = connection_->Call(&GRPCInferenceService::Stub::ModelInfer, message, options);
  if (!response.ok()) return response.status();
  return FromMessage(*response);
}

PendingInfer Client::InferAsync(const InferRequest& request, InferCallback callback,
                                const CallOptions& options) {
  struct Call {
    inference::ModelInferRequest request;
    inference::ModelInferResponse response;
    InferCallback callback;
  };
  auto context = std::make_shared<grpc::ClientContext>();
  auto call = std::make_shared<Call>();
  if (absl::Status status = ToMessage(request, &call->request); !status.ok()) {
    callback(status);
    return PendingInfer(std::move(context));
  }
  call->callback = std::move(callback);
  connection_->Prepare(*context, options);
  calls_->Add();
  connection_->stub->async()->ModelInfer(
      context.get(), &call->request, &call->response,
      [call, context, calls = calls_](grpc::Status status) mutable {
        call->callback(status.ok() ? FromMessage(call->response)
                                   : absl::StatusOr<InferResult>(FromGrpc(status)));
        call.reset();
        context.reset();
        calls->Remove();
      });
  return PendingInfer(std::move(context));
}

absl::StatusOr<bool> Client::ServerLive(const CallOptions& options) {
  auto response = connection_->Call(&GRPCInferenceService::Stub::ServerLive,
                                    inference::ServerLiveRequest(), options);
  if (!response.ok()) return response.status();
  return response->live();
}

absl::StatusOr<bool> Client::ServerReady(const CallOptions& options) {
  auto response = connection_->Call(&GRPCInferenceService::Stub::ServerReady,
                                    inference::ServerReadyRequest(), options);
  if (!response.ok()) return response.status();
  return response->ready();
}

absl::StatusOr<bool> Client::ModelReady(const std::string& model, const std::string& version,
                                        const CallOptions& options) {
  inference::ModelReadyRequest request;
  request.set_name(model);
  request.set_version(version);
  auto response = connection_->Call(&GRPCInferenceService::Stub::ModelReady, request, options);
  if (!response.ok()) return response.status();
  return response->ready();
}

absl::StatusOr<inference::ServerMetadataResponse> Client::ServerMetadata(
    const CallOptions& options) {
  return connection_->Call(&GRPCInferenceService::Stub::ServerMetadata,
                           inference::ServerMetadataRequest(), options);
}

absl::StatusOr<inference::ModelMetadataResponse> Client::ModelMetadata(const std::string& model,
                                                                       const std::string& version,
                                                                       const CallOptions& options) {
  inference::ModelMetadataRequest request;
  request.set_name(model);
  request.set_version(version);
  return connection_->Call(&GRPCInferenceService::Stub::ModelMetadata, request, options);
}

absl::StatusOr<inference::ModelConfig> Client::ModelConfig(const std::string& model,
                                                           const std::string& version,
                                                           const CallOptions& options) {
  inference::ModelConfigRequest request;
  request.set_name(model);
  request.set_version(version);
  auto response = connection_->Call(&GRPCInferenceService::Stub::ModelConfig, request, options);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_config());
}

absl::StatusOr<inference::ModelStatisticsResponse> Client::ModelStatistics(
    const std::string& model, const std::string& version, const CallOptions& options) {
  inference::ModelStatisticsRequest request;
  request.set_name(model);
  request.set_version(version);
  return connection_->Call(&GRPCInferenceService::Stub::ModelStatistics, request, options);
}

absl::StatusOr<inference::RepositoryIndexResponse> Client::RepositoryIndex(
    bool ready_only, const CallOptions& options) {
  inference::RepositoryIndexRequest request;
  request.set_ready(ready_only);
  return connection_->Call(&GRPCInferenceService::Stub::RepositoryIndex, request, options);
}

absl::Status Client::RegisterSystemSharedMemory(const std::string& name, const std::string& key,
                                                uint64_t byte_size, const CallOptions& options) {
  inference::SystemSharedMemoryRegisterRequest request;
  request.set_name(name);
  request.set_key(key);
  request.set_byte_size(byte_size);
  return connection_
      ->Call(&GRPCInferenceService::Stub::SystemSharedMemoryRegister, request, options)
      .status();
}

absl::Status Client::UnregisterSystemSharedMemory(const std::string& name,
                                                  const CallOptions& options) {
  inference::SystemSharedMemoryUnregisterRequest request;
  request.set_name(name);
  return connection_
      ->Call(&GRPCInferenceService::Stub::SystemSharedMemoryUnregister, request, options)
      .status();
}

}  // namespace espalier::client
