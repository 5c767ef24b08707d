#include "service/update_server.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/runtime/log.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "service/listen_address.h"
#include "service/malformed_calls.h"
#include "service/update_service.h"

namespace espalier::service {
namespace {

// A thread for every stream that may be open, and some for the short calls; a call beyond is refused.
constexpr int kThreads = kMaxWatches + kMaxFetches + 16;
// A chunk and what is around it.
constexpr int kMaxMessageBytes = kMaxChunkBytes + 4096;
constexpr int kLookaheadBytes = 64 << 10;
// How long answers that are on their way may take when the server stops.
constexpr absl::Duration kStopGrace = absl::Milliseconds(100);

}  // namespace

absl::StatusOr<std::unique_ptr<UpdateServer>> UpdateServer::Start(UpdateServerOptions options,
                                                                  AccessToken token, Peers& peers,
                                                                  runtime::UpdateManager& manager,
                                                                  Telemetry& telemetry) {
  if (auto status = CheckAddress(options.address, "update_address"); !status.ok()) return status;
  for (const std::string& peer : options.catch_up_from) {
    if (auto status = CheckAddress(peer, "update_peers"); !status.ok()) return status;
  }
  if (!token.required() && !IsLoopback(options.address)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--update_address is '", options.address,
        "', which others reach, and without a token anybody could change weights: give "
        "--update_token_file, or listen on 127.0.0.1"));
  }
  std::unique_ptr<UpdateServer> server(
      new UpdateServer(std::move(options), std::move(token), peers, manager));
  const std::string& address = server->options_.address;
  server->handlers_ = MakeUpdateHandlers(manager, telemetry, server->token_, server->options_.push);
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(-1);
  for (auto algorithm : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_DEFLATE})
    builder.SetCompressionAlgorithmSupportStatus(algorithm, false);
  builder.SetResourceQuota(grpc::ResourceQuota("updates").SetMaxThreads(kThreads));
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
  // What a client has sent ahead of what is read is lost with its connection, and sent again.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kLookaheadBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &server->port_);
  builder.RegisterService(&server->handlers_->service());
  builder.experimental().SetInterceptorCreators(
      MakeMalformedCallAnswers(telemetry, server->token_));
  server->grpc_ = builder.BuildAndStart();
  if (server->grpc_ == nullptr || server->port_ <= 0)
    return CannotListen("updates", address, "update_address");
  return server;
}

UpdateServer::UpdateServer(UpdateServerOptions options, AccessToken token, Peers& peers,
                           runtime::UpdateManager& manager)
    : options_(std::move(options)), token_(std::move(token)), peers_(peers), manager_(manager) {}

UpdateServer::~UpdateServer() { Stop(); }

void UpdateServer::CatchUp(std::function<void()> ready) {
  if (options_.catch_up_from.empty()) return ready();
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  catching_up_ = std::thread([this, ready = std::move(ready)] {
    for (const std::string& peer : options_.catch_up_from) {
      const absl::Status status = peers_.CatchUp(peer, manager_);
      if (status.ok()) break;
      runtime::LogEvent(spdlog::level::warn, "cannot catch up with a peer",
                        {{"peer", peer}, {"reason", status.message()}});
    }
    ready();
  });
}

void UpdateServer::Stop() {
  std::thread catching_up;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    catching_up = std::move(catching_up_);
  }
  if (catching_up.joinable()) catching_up.join();
  if (grpc_ == nullptr) return;
  handlers_->EndAll(absl::UnavailableError("server is shutting down"));
  grpc_->Shutdown(absl::ToChronoTime(absl::Now() + kStopGrace));
  grpc_->Wait();
  grpc_.reset();
}

}  // namespace espalier::service
