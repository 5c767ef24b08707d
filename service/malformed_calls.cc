#include "service/malformed_calls.h"

#include <iterator>
#include <optional>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "service/rpc_scope.h"
#include "service/update_messages.h"

namespace espalier::service {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::Interceptor;
using grpc::experimental::InterceptorBatchMethods;
using grpc::experimental::ServerInterceptorFactoryInterface;
using grpc::experimental::ServerRpcInfo;

// "/espalier.v1.UpdateService/Rollback"; none for a method of another service (reflection).
std::optional<Rpc> RpcOf(absl::string_view method) {
  constexpr absl::string_view kService = "/espalier.v1.UpdateService/";
  if (!absl::StartsWith(method, kService)) return std::nullopt;
  const auto* found = absl::c_find(kRpcNames, method.substr(kService.size()));
  if (found == std::end(kRpcNames)) return std::nullopt;
  return static_cast<Rpc>(found - std::begin(kRpcNames));
}

class MalformedCallAnswer final : public Interceptor {
 public:
  MalformedCallAnswer(Telemetry& telemetry, const AccessToken& token,
                      grpc::ServerContextBase& context, Rpc rpc)
      : telemetry_(telemetry), token_(token), context_(context), rpc_(rpc) {}

  void Intercept(InterceptorBatchMethods* batch) override {
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      const grpc::Status status = batch->GetSendStatus();
      if (status.error_code() == grpc::StatusCode::INTERNAL && status.error_message().empty())
        batch->ModifySendStatus(Answer());
    }
    batch->Proceed();
  }

 private:
  grpc::Status Answer() {
    RpcScope scope(telemetry_, context_, rpc_);
    absl::Status status = token_.Check(AuthorizationOf(context_));
    if (status.ok() && scope.cancelled()) status = NoMessage(scope.deadline_nanos());
    if (status.ok())
      status = absl::InvalidArgumentError(absl::StrCat("malformed ", NameOf(rpc_), "Request"));
    return scope.End(status);
  }

  Telemetry& telemetry_;
  const AccessToken& token_;
  grpc::ServerContextBase& context_;
  const Rpc rpc_;
};

class Factory final : public ServerInterceptorFactoryInterface {
 public:
  Factory(Telemetry& telemetry, const AccessToken& token) : telemetry_(telemetry), token_(token) {}

  Interceptor* CreateServerInterceptor(ServerRpcInfo* info) override {
    const auto rpc = RpcOf(info->method());
    // PushDelta parses its messages itself.
    if (!rpc || *rpc == Rpc::kPushDelta) return nullptr;
    return new MalformedCallAnswer(telemetry_, token_, *info->server_context(), *rpc);
  }

 private:
  Telemetry& telemetry_;
  const AccessToken& token_;
};

}  // namespace

std::vector<std::unique_ptr<ServerInterceptorFactoryInterface>> MakeMalformedCallAnswers(
    Telemetry& telemetry, const AccessToken& token) {
  std::vector<std::unique_ptr<ServerInterceptorFactoryInterface>> all;
  all.push_back(std::make_unique<Factory>(telemetry, token));
  return all;
}

}  // namespace espalier::service
