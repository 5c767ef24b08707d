// rpc_scope.h — the first thing that a handler opens: deadline, cancellation, latency, count and
// trace of one RPC.
#pragma once

#include "absl/status/status.h"
#include "grpcpp/server_context.h"
#include "service/rpcs.h"
#include "service/telemetry.h"

namespace espalier::service {

// The end of an RPC whose message never came, since its client went away or its deadline passed on the
// way: there is nothing wrong with a message that nobody saw. `deadline_nanos` is the scope's.
absl::Status NoMessage(int64_t deadline_nanos);

class RpcScope {
 public:
  // Both outlive the scope.
  RpcScope(Telemetry& telemetry, grpc::ServerContextBase& context, Rpc rpc)
      : telemetry_(telemetry), context_(context), rpc_(rpc) {}

  int64_t arrival_nanos() const { return arrival_nanos_; }
  // When the client stops waiting, on the clock of runtime::NowNanos; INT64_MAX: never.
  int64_t deadline_nanos() const;
  bool cancelled() const { return context_.IsCancelled(); }

  // The end of the RPC: counts, times and (errors at level debug, the rest at trace) logs it.
  // Exactly once.
  grpc::Status End(const absl::Status& status);

  // Ends a unary RPC of the callback API that is answered in its handler; `context` is the scope's.
  grpc::ServerUnaryReactor* Finish(grpc::CallbackServerContext& context,
                                   const absl::Status& status);

 private:
  Telemetry& telemetry_;
  grpc::ServerContextBase& context_;
  const Rpc rpc_;
  const int64_t arrival_nanos_ = runtime::NowNanos();
};

}  // namespace espalier::service
