#include "service/rpc_scope.h"

#include <chrono>

#include "engine/runtime/log.h"
#include "service/status.h"

namespace espalier::service {

absl::Status NoMessage(int64_t deadline_nanos) {
  if (runtime::NowNanos() >= deadline_nanos)
    return absl::DeadlineExceededError("the deadline passed before the message was here");
  return absl::CancelledError("the call ended before its message was here");
}

int64_t RpcScope::deadline_nanos() const {
  const auto deadline = context_.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return INT64_MAX;
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(
      deadline - std::chrono::system_clock::now());
  // A deadline in a hundred years is none; added to the clock it might overflow.
  constexpr std::chrono::hours kCentury(24 * 365 * 100);
  return left > kCentury ? INT64_MAX : arrival_nanos_ + left.count();
}

grpc::Status RpcScope::End(const absl::Status& status) {
  const int64_t nanos = runtime::NowNanos() - arrival_nanos_;
  RpcCounters& counters = telemetry_.rpcs[static_cast<int>(rpc_)];
  counters.by_code[static_cast<int>(status.code())].fetch_add(1, std::memory_order_relaxed);
  counters.latency.Observe(nanos);
  const auto level = status.ok() ? spdlog::level::trace : spdlog::level::debug;
  if (runtime::LogEnabled(level)) {  // peer() is not cheap
    runtime::LogEvent(level, status.ok() ? "rpc answered" : "rpc failed",
                      {{"rpc", NameOf(rpc_)},
                       {"peer", context_.peer()},
                       {"code", CodeName(static_cast<int>(status.code()))},
                       {"micros", nanos / 1000},
                       {"message", status.message()}});
  }
  return ToGrpc(status);
}

grpc::ServerUnaryReactor* RpcScope::Finish(grpc::CallbackServerContext& context,
                                           const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context.DefaultReactor();
  reactor->Finish(End(status));
  return reactor;
}

}  // namespace espalier::service
