#include "service/repository_control.h"

#include <mutex>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/runtime/load_request.h"
#include "engine/runtime/repository.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "service/rpc_scope.h"

namespace espalier::service {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;
using inference::ModelRepositoryParameter;
using Parameters = google::protobuf::Map<std::string, ModelRepositoryParameter>;

// A model has a model file and external data, perhaps a file per tensor.
constexpr int kMaxParameters = 4096;
constexpr size_t kMaxFileNameBytes = 1024;
constexpr int64_t kMaxPending = 256;
constexpr absl::string_view kFilePrefix = "file:";

// One RPC. gRPC owns it until OnDone, which comes after the answer; whoever answers holds the slot.
class RepositoryCall final : public grpc::ServerUnaryReactor {
 public:
  // Answers once; later calls do nothing.
  class Slot {
   public:
    explicit Slot(RepositoryCall* call) : call_(call) {}
    void Answer(const absl::Status& status, const grpc::ByteBuffer& response) {
      const std::lock_guard lock(mutex_);
      if (call_ == nullptr) return;
      if (status.ok()) call_->response_ = response;
      call_->Finish(call_->scope_.End(status));
      call_ = nullptr;
    }

   private:
    std::mutex mutex_;
    RepositoryCall* call_;
  };

  RepositoryCall(Telemetry& telemetry, grpc::CallbackServerContext& context, Rpc rpc,
                 grpc::ByteBuffer& response)
      : scope_(telemetry, context, rpc), response_(response), slot_(std::make_shared<Slot>(this)) {}

  std::shared_ptr<Slot> slot() const { return slot_; }
  int64_t deadline_nanos() const { return scope_.deadline_nanos(); }

 private:
  void OnCancel() override {
    const std::shared_ptr<Slot> slot = slot_;
    slot->Answer(absl::CancelledError("the client no longer waits; the load goes on"), {});
  }
  void OnDone() override { delete this; }

  RpcScope scope_;
  grpc::ByteBuffer& response_;
  const std::shared_ptr<Slot> slot_;
};

// Counts a request's bytes while it lives.
class Pending {
 public:
  Pending(std::shared_ptr<InFlight> in_flight, int64_t bytes)
      : in_flight_(std::move(in_flight)), bytes_(bytes) {}
  ~Pending() { in_flight_->Leave(bytes_); }
  Pending(const Pending&) = delete;

 private:
  const std::shared_ptr<InFlight> in_flight_;
  const int64_t bytes_;
};

absl::Status WrongType(absl::string_view key, absl::string_view expected) {
  return InvalidArgumentError(
      StrCat("parameter '", key, "' has another type, expected ", expected));
}

absl::StatusOr<int64_t> ReadVersion(const ModelRepositoryParameter& value) {
  std::string text = value.string_param();
  if (value.parameter_choice_case() == ModelRepositoryParameter::kInt64Param) {
    text = StrCat(value.int64_param());
  } else if (value.parameter_choice_case() != ModelRepositoryParameter::kStringParam) {
    return WrongType("version", "a string or an int64");
  }
  if (const auto version = runtime::ParseVersion(text)) return *version;
  return InvalidArgumentError(StrCat("parameter 'version' is '", runtime::Printable(text),
                                     "', expected an integer above zero"));
}

using Files = std::map<int64_t, runtime::FilesInMemory>;

// "file:<version>/<path>", whose content is taken out of `value`.
absl::Status ReadFile(const std::string& key, ModelRepositoryParameter& value, Files& files) {
  const absl::string_view place = absl::StripPrefix(key, kFilePrefix);
  const size_t slash = place.find('/');
  const auto version = runtime::ParseVersion(place.substr(0, slash));
  if (slash == absl::string_view::npos || !version || key.size() > kMaxFileNameBytes ||
      !runtime::IsFilePath(place.substr(slash + 1))) {
    return InvalidArgumentError(
        StrCat("parameter '", runtime::Printable(key),
               "': expected file:<version>/<name> with a version above zero and a path below the "
               "version's folder, without '..'"));
  }
  if (value.parameter_choice_case() != ModelRepositoryParameter::kBytesParam)
    return WrongType(runtime::Printable(key), "bytes");
  files[*version][std::string(place.substr(slash + 1))] = std::move(*value.mutable_bytes_param());
  return absl::OkStatus();
}

absl::Status Unknown(absl::string_view key, absl::string_view expected) {
  return InvalidArgumentError(
      StrCat("parameter '", runtime::Printable(key), "' is unknown, expected ", expected));
}

absl::StatusOr<runtime::LoadRequest> ReadLoad(Parameters& parameters) {
  runtime::LoadRequest load;
  Files files;
  for (auto& [key, value] : parameters) {
    absl::Status status;
    if (absl::StartsWith(key, kFilePrefix)) {
      status = ReadFile(key, value, files);
    } else if (key == "version") {
      auto version = ReadVersion(value);
      status = version.status();
      if (version.ok()) load.version = *version;
    } else if (key != "config") {
      status = Unknown(key, "config, file:<version>/<name> or version");
    } else if (value.parameter_choice_case() != ModelRepositoryParameter::kStringParam) {
      status = WrongType(key, "a string");
    } else {
      load.config_json = std::move(*value.mutable_string_param());
      if (load.config_json.empty()) status = InvalidArgumentError("parameter 'config' is empty");
    }
    if (!status.ok()) return status;
  }
  for (auto& [version, content] : files)
    load.files[version] = std::make_shared<const runtime::FilesInMemory>(std::move(content));
  return load;
}

// The version to unload, 0 for all of them.
absl::StatusOr<int64_t> ReadUnload(const Parameters& parameters) {
  int64_t result = 0;
  for (const auto& [key, value] : parameters) {
    if (key == "version") {
      auto version = ReadVersion(value);
      if (!version.ok()) return version;
      result = *version;
    } else if (key != "unload_dependents") {
      return Unknown(key, "unload_dependents or version");
    } else if (value.parameter_choice_case() != ModelRepositoryParameter::kBoolParam) {
      return WrongType(key, "a bool");
    }
  }
  return result;
}

// Parses, and finds the model's name in either form of request.
template <typename Request>
absl::StatusOr<std::string> Read(Rpc rpc, grpc::ByteBuffer& message, Request& request) {
  if (!grpc::SerializationTraits<Request>::Deserialize(&message, &request).ok())
    return InvalidArgumentError(StrCat("malformed ", NameOf(rpc), "Request"));
  if (request.parameters_size() > kMaxParameters) {
    return InvalidArgumentError(StrCat("the request has ", request.parameters_size(),
                                       " parameters, expected at most ", kMaxParameters));
  }
  if (request.model_name().empty()) return request.repository_name();
  if (!request.repository_name().empty())
    return absl::UnimplementedError("'repository_name' specification is not supported");
  return request.model_name();
}

template <typename Response>
grpc::ByteBuffer Written(const Response& response) {
  grpc::ByteBuffer buffer;
  bool owned = false;
  (void)grpc::SerializationTraits<Response>::Serialize(response, &buffer, &owned);
  return buffer;
}

absl::Status Admit(const ServiceState& state, InFlight& pending, int64_t bytes) {
  if (state.draining.load(std::memory_order_relaxed))
    return absl::UnavailableError("server is shutting down");
  if (!state.model_control) {  // text and code are Triton's, in mode none too
    return absl::UnavailableError(
        "explicit model load / unload is not allowed if polling is enabled: this server was not "
        "started with --model_control_mode=explicit");
  }
  return pending.Enter(bytes);
}

}  // namespace

RepositoryControl::RepositoryControl(ServiceState& state)
    : state_(state),
      pending_(std::make_shared<InFlight>(
          InFlightLimits{kMaxPending, state.telemetry.in_flight.limits().max_bytes})),
      worker_(1, "repository") {}

template <typename Request, typename Handle>
grpc::ServerUnaryReactor* RepositoryControl::Open(Rpc rpc, grpc::CallbackServerContext* context,
                                                  const grpc::ByteBuffer* message,
                                                  grpc::ByteBuffer* response, Handle handle) {
  auto* call = new RepositoryCall(state_.telemetry, *context, rpc, *response);
  const auto slot = call->slot();
  if (!message->Valid()) {
    slot->Answer(NoMessage(call->deadline_nanos()), {});
    return call;
  }
  const auto bytes = static_cast<int64_t>(message->Length());
  if (absl::Status status = Admit(state_, *pending_, bytes); !status.ok()) {
    slot->Answer(status, {});
    return call;
  }
  auto pending = std::make_shared<const Pending>(pending_, bytes);
  worker_.Schedule([rpc, slot, pending, handle, message = grpc::ByteBuffer(*message)]() mutable {
    const auto answer = [slot, pending](const absl::Status& status,
                                        const grpc::ByteBuffer& written) {
      slot->Answer(status, written);
    };
    Request request;
    const auto name = Read(rpc, message, request);
    if (!name.ok()) return answer(name.status(), {});
    handle(*name, request, answer);
  });
  return call;
}

grpc::ServerUnaryReactor* RepositoryControl::RepositoryModelLoad(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* message,
    grpc::ByteBuffer* response) {
  return Open<inference::RepositoryModelLoadRequest>(
      Rpc::kRepositoryModelLoad, context, message, response,
      [this](const std::string& name, auto& request, const auto& answer) {
        auto load = ReadLoad(*request.mutable_parameters());
        if (!load.ok()) return answer(load.status(), {});
        state_.models.Load(name, *std::move(load), [name, answer](const absl::Status& status) {
          inference::RepositoryModelLoadResponse loaded;
          loaded.set_model_name(name);
          loaded.set_isloaded(true);
          answer(status, Written(loaded));
        });
      });
}

grpc::ServerUnaryReactor* RepositoryControl::RepositoryModelUnload(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* message,
    grpc::ByteBuffer* response) {
  return Open<inference::RepositoryModelUnloadRequest>(
      Rpc::kRepositoryModelUnload, context, message, response,
      [this](const std::string& name, auto& request, const auto& answer) {
        const auto version = ReadUnload(request.parameters());
        if (!version.ok()) return answer(version.status(), {});
        absl::Status status = state_.models.Unload(
            name, *version == 0 ? std::nullopt : std::optional<int64_t>(*version));
        // The code is Triton's.
        if (absl::IsNotFound(status)) status = InvalidArgumentError(status.message());
        inference::RepositoryModelUnloadResponse unloaded;
        unloaded.set_model_name(name);
        unloaded.set_isunloaded(true);
        answer(status, Written(unloaded));
      });
}

}  // namespace espalier::service
