#include "clients/cpp/update_client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "clients/cpp/grpc_status.h"

namespace espalier::client {
namespace {

// A cut loses half of one on average, and the server takes 1 MiB at most.
constexpr size_t kChunkBytes = 64 << 10;
// Attempts in a row that bring no byte further (a server may be starting again; one that never answered
// is probably not there), and what lies between them.
constexpr int kFruitlessAttempts = 8, kFirstAttempts = 3;
constexpr absl::Duration kFirstPause = absl::Milliseconds(100);

}  // namespace

absl::StatusOr<std::unique_ptr<UpdateClient>> UpdateClient::Create(const std::string& target,
                                                                   UpdateClientOptions options) {
  if (auto status = CheckTarget(target, "127.0.0.1:8003"); !status.ok()) return status;
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(std::numeric_limits<int>::max());
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // A server that vanished without a word is noticed by pushes and watches, which have no deadline.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  auto stub = v1::UpdateService::NewStub(
      grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments));
  return std::unique_ptr<UpdateClient>(
      new UpdateClient(target, std::move(options), std::move(stub)));
}

void UpdateClient::Authorize(grpc::ClientContext& context) const {
  if (!options_.token.empty())
    context.AddMetadata("authorization", absl::StrCat("Bearer ", options_.token));
}

template <typename Request, typename Response>
absl::StatusOr<Response> UpdateClient::Call(grpc::Status (v1::UpdateService::Stub::*method)(
                                                grpc::ClientContext*, const Request&, Response*),
                                            const Request& request, absl::Duration extra) const {
  grpc::ClientContext context;
  Authorize(context);
  context.set_deadline(absl::ToChronoTime(absl::Now() + options_.deadline + extra));
  Response response;
  if (auto status = FromGrpc((*stub_.*method)(&context, request, &response)); !status.ok())
    return status;
  return response;
}

absl::StatusOr<v1::StagedVersion> UpdateClient::Push(
    const PushSource& source, const std::function<void(uint64_t)>& progress) {
  std::optional<uint64_t> furthest;
  for (int fruitless = 0;; ++fruitless) {
    std::optional<uint64_t> offset;
    auto staged = PushOnce(source, progress, offset);
    if (!absl::IsUnavailable(staged.status())) return staged;
    if (offset > furthest) {
      furthest = offset;
      fruitless = 0;
    }
    if (fruitless + 1 >= (furthest ? kFruitlessAttempts : kFirstAttempts)) return staged;
    absl::SleepFor(kFirstPause * (1 << fruitless));
  }
}

absl::StatusOr<v1::StagedVersion> UpdateClient::PushOnce(
    const PushSource& source, const std::function<void(uint64_t)>& progress,
    std::optional<uint64_t>& offset) const {
  grpc::ClientContext context;
  Authorize(context);
  const auto stream = stub_->PushDelta(&context);
  v1::PushDeltaRequest request;
  request.mutable_header()->set_model(source.model);
  request.mutable_header()->set_sha256(source.sha256);
  request.mutable_header()->set_bytes(source.bytes);
  stream->Write(request);
  v1::PushDeltaResponse response;
  if (!stream->Read(&response)) return EndWithoutAnswer(stream->Finish());
  if (!response.has_staged()) {
    offset = response.offset();
    if (offset > source.bytes) {
      context.TryCancel();
      return absl::InternalError(
          absl::StrCat("the server asks for byte ", *offset, " of a delta of ", source.bytes));
    }
    for (uint64_t at = *offset; at < source.bytes; at += request.chunk().size()) {
      std::string& chunk = *request.mutable_chunk();
      chunk.resize(std::min<uint64_t>(kChunkBytes, source.bytes - at));
      if (auto status = source.read(at, chunk.data(), chunk.size()); !status.ok()) {
        context.TryCancel();
        return status;
      }
      if (!stream->Write(request)) break;  // the server has ended it, or is gone
      if (progress) progress(at + chunk.size());
    }
    stream->WritesDone();
    if (!stream->Read(&response)) return EndWithoutAnswer(stream->Finish());
  }
  if (auto status = FromGrpc(stream->Finish()); !status.ok()) return status;
  return response.staged();
}

absl::Status UpdateClient::EndWithoutAnswer(const grpc::Status& end) {
  if (end.ok()) return absl::InternalError("the server ended the push without an answer");
  return FromGrpc(end);
}

absl::Status UpdateClient::Activate(const std::string& model, int64_t version,
                                    const std::optional<v1::Probation>& probation) {
  v1::ActivateVersionRequest request;
  request.set_model(model);
  request.set_version(version);
  if (probation) *request.mutable_probation() = *probation;
  // The answer comes when the canary is over.
  const absl::Duration canary = absl::Seconds(request.probation().canary_seconds());
  return Call(&v1::UpdateService::Stub::ActivateVersion, request, canary).status();
}

absl::StatusOr<int64_t> UpdateClient::Rollback(const std::string& model, const std::string& reason,
                                               int64_t version) {
  v1::RollbackRequest request;
  request.set_model(model);
  request.set_version(version);
  request.set_reason(reason);
  const auto response = Call(&v1::UpdateService::Stub::Rollback, request);
  if (!response.ok()) return response.status();
  return response->version();
}

absl::Status UpdateClient::Confirm(const std::string& model, int64_t version) {
  v1::ConfirmVersionRequest request;
  request.set_model(model);
  request.set_version(version);
  return Call(&v1::UpdateService::Stub::ConfirmVersion, request).status();
}

absl::StatusOr<v1::ListVersionsResponse> UpdateClient::List(const std::string& model) {
  v1::ListVersionsRequest request;
  request.set_model(model);
  return Call(&v1::UpdateService::Stub::ListVersions, request);
}

absl::StatusOr<v1::ReadAuditResponse> UpdateClient::Audit(const std::string& model, int most) {
  v1::ReadAuditRequest request;
  request.set_model(model);
  request.set_most(most);
  return Call(&v1::UpdateService::Stub::ReadAudit, request);
}

absl::Status UpdateClient::Watch(
    const std::string& model, int64_t after_serial,
    const std::function<bool(const v1::WatchVersionsResponse&)>& each) {
  v1::WatchVersionsRequest request;
  request.set_model(model);
  request.set_after_serial(after_serial);
  grpc::ClientContext context;
  Authorize(context);
  const auto stream = stub_->WatchVersions(&context, request);
  v1::WatchVersionsResponse event;
  while (stream->Read(&event)) {
    if (each(event)) continue;
    context.TryCancel();
    stream->Finish();
    return absl::OkStatus();
  }
  return FromGrpc(stream->Finish());
}

absl::Status UpdateClient::Fetch(
    const std::string& model, int64_t from_version,
    const std::function<absl::Status(const v1::FetchDeltasResponse&)>& each) {
  v1::FetchDeltasRequest request;
  request.set_model(model);
  request.set_from_version(from_version);
  grpc::ClientContext context;
  Authorize(context);
  const auto stream = stub_->FetchDeltas(&context, request);
  v1::FetchDeltasResponse part;
  while (stream->Read(&part)) {
    if (auto status = each(part); !status.ok()) {
      context.TryCancel();
      stream->Finish();
      return status;
    }
  }
  return FromGrpc(stream->Finish());
}

absl::Status UpdateClient::Prepare(const v1::Transaction& transaction, int self) {
  v1::PrepareTransactionRequest request;
  *request.mutable_transaction() = transaction;
  request.set_self(self);
  // The answer comes when the canary is over.
  const absl::Duration canary = absl::Seconds(transaction.probation().canary_seconds());
  const auto response = Call(&v1::UpdateService::Stub::PrepareTransaction, request, canary);
  if (!response.ok()) return response.status();
  if (!transaction.has_probation() || response->probation()) return absl::OkStatus();
  return absl::FailedPreconditionError("it is an older server, whose fleets know no probation");
}

absl::StatusOr<v1::TransactionState> UpdateClient::Decide(const v1::Transaction& transaction,
                                                          bool commit) {
  v1::DecideTransactionRequest request;
  request.set_model(transaction.model());
  request.set_id(transaction.id());
  request.set_commit(commit);
  const auto response = Call(&v1::UpdateService::Stub::DecideTransaction, request);
  if (!response.ok()) return response.status();
  return response->state();
}

absl::StatusOr<v1::GetTransactionResponse> UpdateClient::GetTransaction(const std::string& id) {
  v1::GetTransactionRequest request;
  request.set_id(id);
  return Call(&v1::UpdateService::Stub::GetTransaction, request);
}

}  // namespace espalier::client
