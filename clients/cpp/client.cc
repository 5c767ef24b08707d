#include "clients/cpp/client.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "proto/inference/grpc_service.grpc.pb.h"

namespace espalier::client {
namespace {

using inference::GRPCInferenceService;

constexpr int kMaxMessageBytes = std::numeric_limits<int>::max();

// Both enums are the canonical codes with the same numbers. A server that fails without a text
// still gets one here.
absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(
      static_cast<absl::StatusCode>(status.error_code()),
      status.error_message().empty() ? "the server gave no message" : status.error_message());
}

void SetParameter(const Parameter& from, inference::InferParameter* to) {
  struct Setter {
    inference::InferParameter* to;
    void operator()(bool value) const { to->set_bool_param(value); }
    void operator()(int64_t value) const { to->set_int64_param(value); }
    void operator()(uint64_t value) const { to->set_uint64_param(value); }
    void operator()(double value) const { to->set_double_param(value); }
    void operator()(const std::string& value) const { to->set_string_param(value); }
  };
  std::visit(Setter{to}, from);
}

Parameter GetParameter(const inference::InferParameter& from) {
  switch (from.parameter_choice_case()) {
    case inference::InferParameter::kInt64Param:
      return from.int64_param();
    case inference::InferParameter::kUint64Param:
      return from.uint64_param();
    case inference::InferParameter::kDoubleParam:
      return from.double_param();
    case inference::InferParameter::kStringParam:
      return from.string_param();
    default:
      return from.bool_param();
  }
}

absl::Status Encode(const InferRequest& from, inference::ModelInferRequest* to) {
  to->set_model_name(from.model);
  to->set_model_version(from.version);
  to->set_id(from.id);
  for (const auto& [key, value] : from.parameters)
    SetParameter(value, &(*to->mutable_parameters())[key]);
  for (const std::string& name : from.outputs) to->add_outputs()->set_name(name);
  uint64_t total_bytes = 0;
  for (const Tensor& tensor : from.inputs) {
    if (absl::Status status = CheckTensor(tensor); !status.ok()) return status;
    total_bytes += tensor.bytes.size();
    if (total_bytes >= kMaxMessageBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("the request has more than ", kMaxMessageBytes,
                       " bytes of tensors; send fewer items in one request"));
    }
    auto* input = to->add_inputs();
    input->set_name(tensor.name);
    input->set_datatype(tensor.datatype);
    for (int64_t dim : tensor.shape) input->add_shape(dim);
    to->add_raw_input_contents(tensor.bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<InferResult> Decode(inference::ModelInferResponse& from) {
  if (from.raw_output_contents_size() != from.outputs_size()) {
    return absl::InternalError(absl::StrCat("the server answered with ", from.outputs_size(),
                                            " outputs and ", from.raw_output_contents_size(),
                                            " raw contents"));
  }
  InferResult result{from.model_name(), from.model_version(), from.id(), {}, {}};
  for (const auto& [key, value] : from.parameters()) result.parameters[key] = GetParameter(value);
  for (int i = 0; i < from.outputs_size(); ++i) {
    auto& output = *from.mutable_outputs(i);
    Tensor tensor{std::move(*output.mutable_name()),
                  std::move(*output.mutable_datatype()),
                  {output.shape().begin(), output.shape().end()},
                  std::move(*from.mutable_raw_output_contents(i))};
    if (absl::Status status = CheckTensor(tensor); !status.ok()) {
      return absl::InternalError(
          absl::StrCat("the server answered with a bad output: ", status.message()));
    }
    result.outputs.push_back(std::move(tensor));
  }
  return result;
}

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
  if (target.empty() || absl::StartsWith(target, "http://") ||
      absl::StartsWith(target, "https://")) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", target, "' is no gRPC target; give host:port without a scheme, e.g. 127.0.0.1:8001"));
  }
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
  if (absl::Status status = Encode(request, &message); !status.ok()) return status;
  auto response = connection_->Call(&GRPCInferenceService::Stub::ModelInfer, message, options);
  if (!response.ok()) return response.status();
  return Decode(*response);
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
  if (absl::Status status = Encode(request, &call->request); !status.ok()) {
    callback(status);
    return PendingInfer(std::move(context));
  }
  call->callback = std::move(callback);
  connection_->Prepare(*context, options);
  calls_->Add();
  connection_->stub->async()->ModelInfer(
      context.get(), &call->request, &call->response,
      [call, context, calls = calls_](grpc::Status status) mutable {
        call->callback(status.ok() ? Decode(call->response)
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

}  // namespace espalier::client
