#include "service/peers.h"

#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/runtime/log.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "service/push_delta.h"
#include "service/update_messages.h"

namespace espalier::service {
namespace {

constexpr absl::Duration kAskDeadline = absl::Seconds(2);
constexpr absl::Duration kFetchDeadline = absl::Minutes(10);

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// The deltas of a FetchDeltas stream, into the manager, as if a client had pushed them.
class Receiver {
 public:
  Receiver(runtime::UpdateManager& manager, std::string model)
      : manager_(manager), model_(std::move(model)) {}

  absl::Status Take(const v1::FetchDeltasResponse& part) {
    if (part.has_header()) return Begin(part.header());
    const std::string& chunk = part.chunk();
    if (!file_ || chunk.empty() || chunk.size() > kMaxChunkBytes || chunk.size() > total_ - seen_)
      return absl::DataLossError("the peer sends other bytes than it says");
    const uint64_t at = seen_;
    seen_ += chunk.size();
    if (seen_ <= received_) return absl::OkStatus();  // an earlier start got it
    const uint64_t known = received_ > at ? received_ - at : 0;
    received_ = seen_;
    return manager_.Append(model_, *file_, at + known, absl::string_view(chunk).substr(known));
  }

  absl::Status End() {
    if (!file_) return absl::OkStatus();
    if (seen_ != total_) return absl::DataLossError("the peer sends fewer bytes than it says");
    return manager_.Stage(model_, *std::exchange(file_, std::nullopt)).status();
  }

 private:
  absl::Status Begin(const v1::DeltaHeader& header) {
    if (auto status = End(); !status.ok()) return status;
    const auto digest = ReadDigest("sha256", header.sha256());
    if (!digest.ok()) return digest.status();
    const auto offset = manager_.BeginReceive(model_, *digest, header.bytes());
    if (!offset.ok()) return offset.status();
    file_ = *digest;
    total_ = header.bytes();
    received_ = *offset;
    seen_ = 0;
    return absl::OkStatus();
  }

  runtime::UpdateManager& manager_;
  const std::string model_;
  std::optional<updates::Digest> file_;
  uint64_t total_ = 0, seen_ = 0, received_ = 0;
};

}  // namespace

v1::UpdateService::Stub& Peers::StubOf(const std::string& peer) {
  const std::lock_guard lock(mutex_);
  auto& stub = stubs_[peer];
  if (stub == nullptr) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(std::numeric_limits<int>::max());
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
    stub = v1::UpdateService::NewStub(
        grpc::CreateCustomChannel(peer, grpc::InsecureChannelCredentials(), arguments));
  }
  return *stub;
}

void Peers::Prepare(grpc::ClientContext& context, absl::Duration deadline) const {
  if (!authorization_.empty()) context.AddMetadata("authorization", authorization_);
  context.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
}

absl::StatusOr<updates::FleetDecision> Peers::AskTransaction(const std::string& peer,
                                                             const std::string& model,
                                                             const std::string& id) {
  grpc::ClientContext context;
  Prepare(context, kAskDeadline);
  v1::GetTransactionRequest request;
  request.set_model(model);
  request.set_id(id);
  v1::GetTransactionResponse response;
  auto status = FromGrpc(StubOf(peer).GetTransaction(&context, request, &response));
  if (!status.ok()) return status;
  if (response.state() == v1::COMMITTED) return updates::FleetDecision::kCommit;
  if (response.state() == v1::ABORTED) return updates::FleetDecision::kAbort;
  return updates::FleetDecision::kUndecided;
}

absl::Status Peers::CatchUp(const std::string& peer, runtime::UpdateManager& manager) {
  grpc::ClientContext context;
  Prepare(context, kAskDeadline);
  v1::ListVersionsResponse theirs;
  if (auto status =
          FromGrpc(StubOf(peer).ListVersions(&context, v1::ListVersionsRequest(), &theirs));
      !status.ok()) {
    return status;
  }
  const auto own = manager.List("");
  if (!own.ok()) return own.status();
  absl::Status first;
  for (const runtime::ModelVersions& model : *own) {
    for (const v1::ModelVersions& other : theirs.models()) {
      if (other.model() == model.store.model) first.Update(CatchUp(peer, manager, model, other));
    }
  }
  return first;
}

absl::Status Peers::CatchUp(const std::string& peer, runtime::UpdateManager& manager,
                            const runtime::ModelVersions& own, const v1::ModelVersions& theirs) {
  if (own.serving == theirs.serving()) return absl::OkStatus();
  absl::Status status = Receive(peer, manager, own);
  if (status.ok()) {
    status = manager.Activate(own.store.model, theirs.serving(), runtime::ProbationOptions());
  }
  runtime::LogEvent(status.ok() ? spdlog::level::info : spdlog::level::warn,
                    status.ok() ? "caught up with a peer" : "cannot catch up with a peer",
                    {{"model", own.store.model},
                     {"peer", peer},
                     {"from", own.serving},
                     {"to", int64_t{theirs.serving()}},
                     {"reason", status.message()}});
  return status;
}

absl::Status Peers::Receive(const std::string& peer, runtime::UpdateManager& manager,
                            const runtime::ModelVersions& own) {
  grpc::ClientContext context;
  Prepare(context, kFetchDeadline);
  v1::FetchDeltasRequest request;
  request.set_model(own.store.model);
  request.set_from_version(own.serving);
  const auto stream = StubOf(peer).FetchDeltas(&context, request);
  Receiver receiver(manager, own.store.model);
  v1::FetchDeltasResponse part;
  while (stream->Read(&part)) {
    if (auto status = receiver.Take(part); !status.ok()) {
      context.TryCancel();
      stream->Finish();
      return status;
    }
  }
  if (auto status = FromGrpc(stream->Finish()); !status.ok()) return status;
  return receiver.End();
}

}  // namespace espalier::service
