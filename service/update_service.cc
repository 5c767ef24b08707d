#include "service/update_service.h"

#include <atomic>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/espalier/v1/update.grpc.pb.h"
#include "service/rpc_scope.h"
#include "service/update_messages.h"

namespace espalier::service {
namespace {

using grpc::ServerContext;
using grpc::ServerWriter;

constexpr size_t kFetchChunkBytes = 256 << 10;
constexpr int kDefaultAudit = 100, kMaxAudit = 1000;
constexpr size_t kMaxReasonBytes = updates::kMaxReasonBytes;
// How soon a watch notices that its client has gone.
constexpr absl::Duration kWatchTick = absl::Seconds(1);

using Base = v1::UpdateService::WithRawCallbackMethod_PushDelta<v1::UpdateService::Service>;

class Handlers final : public Base, public UpdateHandlers {
 public:
  Handlers(runtime::UpdateManager& manager, Telemetry& telemetry, const AccessToken& token,
           PushLimits limits)
      : manager_(manager),
        telemetry_(telemetry),
        token_(token),
        pushes_(manager, telemetry, token, limits) {}

  grpc::Service& service() override { return *this; }
  void EndAll(const absl::Status& why) override {
    closed_ = true;
    pushes_.EndAll(why);
  }

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* PushDelta(
      grpc::CallbackServerContext* context) override {
    return pushes_.Open(*context);
  }

  grpc::Status ActivateVersion(ServerContext* context, const v1::ActivateVersionRequest* request,
                               v1::ActivateVersionResponse*) override {
    return Answer(*context, Rpc::kActivateVersion, request->model(), [&]() -> absl::Status {
      if (auto status = CheckVersion(request->version()); !status.ok()) return status;
      std::optional<runtime::ProbationOptions> probation;
      if (request->has_probation()) {
        auto read = ReadProbation(request->probation());
        if (!read.ok()) return read.status();
        probation = *read;
      }
      return manager_.Activate(request->model(), request->version(), probation);
    });
  }

  grpc::Status Rollback(ServerContext* context, const v1::RollbackRequest* request,
                        v1::RollbackResponse* response) override {
    return Answer(*context, Rpc::kRollback, request->model(), [&]() -> absl::Status {
      if (request->version() < 0) return CheckVersion(request->version());
      if (request->reason().size() > kMaxReasonBytes) {
        return absl::InvalidArgumentError(absl::StrCat(
            "reason has ", request->reason().size(), " bytes, expected at most ", kMaxReasonBytes));
      }
      const auto version =
          manager_.Rollback(request->model(), request->reason(), request->version());
      if (version.ok()) response->set_version(*version);
      return version.status();
    });
  }

  grpc::Status ConfirmVersion(ServerContext* context, const v1::ConfirmVersionRequest* request,
                              v1::ConfirmVersionResponse*) override {
    return Answer(*context, Rpc::kConfirmVersion, request->model(), [&]() -> absl::Status {
      if (auto status = CheckVersion(request->version()); !status.ok()) return status;
      return manager_.Confirm(request->model(), request->version());
    });
  }

  grpc::Status ListVersions(ServerContext* context, const v1::ListVersionsRequest* request,
                            v1::ListVersionsResponse* response) override {
    return Answer(*context, Rpc::kListVersions, request->model(), kAllModels, [&] {
      const auto models = manager_.List(request->model());
      if (!models.ok()) return models.status();
      for (const auto& model : *models) *response->add_models() = ToMessage(model);
      return absl::OkStatus();
    });
  }

  grpc::Status WatchVersions(ServerContext* context, const v1::WatchVersionsRequest* request,
                             ServerWriter<v1::WatchVersionsResponse>* writer) override {
    return Answer(*context, Rpc::kWatchVersions, request->model(), kAllModels, [&]() {
      return Limited(watches_, kMaxWatches, [&] { return Watch(*context, *request, *writer); });
    });
  }

  grpc::Status FetchDeltas(ServerContext* context, const v1::FetchDeltasRequest* request,
                           ServerWriter<v1::FetchDeltasResponse>* writer) override {
    return Answer(*context, Rpc::kFetchDeltas, request->model(), [&]() {
      return Limited(fetches_, kMaxFetches, [&] { return Fetch(*request, *writer); });
    });
  }

  grpc::Status ReadAudit(ServerContext* context, const v1::ReadAuditRequest* request,
                         v1::ReadAuditResponse* response) override {
    return Answer(*context, Rpc::kReadAudit, request->model(), [&]() -> absl::Status {
      const int most = request->most() == 0 ? kDefaultAudit : request->most();
      if (most < 1 || most > kMaxAudit) {
        return absl::InvalidArgumentError(
            absl::StrCat("most is ", most, ", expected 1 to ", kMaxAudit));
      }
      const auto records = manager_.Audit(request->model(), static_cast<size_t>(most));
      if (!records.ok()) return records.status();
      for (const auto& record : *records) *response->add_records() = ToMessage(record);
      return absl::OkStatus();
    });
  }

  grpc::Status PrepareTransaction(ServerContext* context,
                                  const v1::PrepareTransactionRequest* request,
                                  v1::PrepareTransactionResponse* response) override {
    const std::string& model = request->transaction().model();
    response->set_probation(request->transaction().has_probation());
    return Answer(*context, Rpc::kPrepareTransaction, model, [&]() -> absl::Status {
      auto transaction = ReadTransaction(*request);
      if (!transaction.ok()) return transaction.status();
      const auto weights = ReadDigest("weights", request->transaction().weights());
      if (!weights.ok()) return weights.status();
      const auto models = manager_.List(model);
      if (!models.ok()) return models.status();
      const auto* version = models->front().store.Find(transaction->version);
      if (version != nullptr && version->weights != *weights) {
        return absl::FailedPreconditionError(absl::StrCat(
            "version ", version->number, " has other weights here: ",
            updates::ShortHex(version->weights), ", not ", updates::ShortHex(*weights)));
      }
      return manager_.Prepare(model, *std::move(transaction));
    });
  }

  grpc::Status DecideTransaction(ServerContext* context,
                                 const v1::DecideTransactionRequest* request,
                                 v1::DecideTransactionResponse* response) override {
    return Answer(*context, Rpc::kDecideTransaction, request->model(), [&]() -> absl::Status {
      const auto transaction = manager_.Decide(
          request->model(), request->id(),
          request->commit() ? updates::FleetDecision::kCommit : updates::FleetDecision::kAbort);
      if (transaction.ok()) response->set_state(ToMessage(transaction->decision));
      return transaction.status();
    });
  }

  grpc::Status GetTransaction(ServerContext* context, const v1::GetTransactionRequest* request,
                              v1::GetTransactionResponse* response) override {
    return Answer(*context, Rpc::kGetTransaction, request->model(), kAllModels,
                  [&]() -> absl::Status {
                    const auto models = manager_.List(request->model());
                    if (!models.ok()) return models.status();
                    for (const auto& model : *models) {
                      const auto found = manager_.Transaction(model.store.model, request->id());
                      if (found.ok()) *response = ToMessage(model.store.model, *found);
                      if (!absl::IsNotFound(found.status())) return found.status();
                    }
                    return absl::NotFoundError("no such transaction is known here");
                  });
  }

 private:
  enum Models { kOneModel, kAllModels };  // whether the name may be empty

  // What every handler but PushDelta does around its own work.
  template <typename Work>
  grpc::Status Answer(ServerContext& context, Rpc rpc, const std::string& model, Models models,
                      Work work) {
    RpcScope scope(telemetry_, context, rpc);
    absl::Status status = token_.Check(AuthorizationOf(context));
    if (status.ok() && closed_) status = absl::UnavailableError("server is shutting down");
    if (status.ok() && (models == kOneModel || !model.empty())) status = CheckModelName(model);
    if (status.ok()) status = work();
    return scope.End(status);
  }
  template <typename Work>
  grpc::Status Answer(ServerContext& context, Rpc rpc, const std::string& model, Work work) {
    return Answer(context, rpc, model, kOneModel, std::move(work));
  }

  template <typename Work>
  static absl::Status Limited(std::atomic<int>& open, int most, Work work) {
    const absl::Cleanup leave = [&] { --open; };
    if (++open <= most) return work();
    return absl::ResourceExhaustedError(
        absl::StrCat("as many such streams as may be are open: ", most));
  }

  absl::Status Watch(const ServerContext& context, const v1::WatchVersionsRequest& request,
                     ServerWriter<v1::WatchVersionsResponse>& writer) const {
    writer.SendInitialMetadata();  // from here on the client misses nothing
    int64_t serial = request.after_serial();
    while (!context.IsCancelled()) {
      const auto events = manager_.EventsAfter(serial, request.model(), absl::Now() + kWatchTick);
      if (absl::IsCancelled(events.status()) || closed_)
        return absl::UnavailableError("server is shutting down");
      if (!events.ok()) return events.status();
      for (const runtime::VersionEvent& event : *events) {
        if (!writer.Write(ToMessage(event))) break;
        serial = event.serial;
      }
    }
    return absl::CancelledError("the client went away");
  }

  absl::Status Fetch(const v1::FetchDeltasRequest& request,
                     ServerWriter<v1::FetchDeltasResponse>& writer) const {
    if (auto status = CheckVersion(request.from_version()); !status.ok()) return status;
    const auto deltas = manager_.DeltasFrom(request.model(), request.from_version());
    if (!deltas.ok()) return deltas.status();
    const auto models = manager_.List(request.model());
    if (!models.ok()) return models.status();
    for (const updates::StoredDelta& delta : *deltas) {
      const updates::VersionRecord* to = models->front().store.Find(delta.to);
      if (to == nullptr) return absl::AbortedError("the versions changed meanwhile: try again");
      v1::FetchDeltasResponse response;
      response.mutable_header()->set_from_version(delta.from);
      response.mutable_header()->set_to_version(delta.to);
      response.mutable_header()->set_bytes(delta.source->size());
      response.mutable_header()->set_sha256(std::string(to->delta.begin(), to->delta.end()));
      if (!writer.Write(response)) return absl::CancelledError("the client went away");
      if (auto status = WriteBytes(*delta.source, writer); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  static absl::Status WriteBytes(const updates::ByteSource& source,
                                 ServerWriter<v1::FetchDeltasResponse>& writer) {
    v1::FetchDeltasResponse response;
    for (uint64_t at = 0; at < source.size(); at += response.chunk().size()) {
      std::string& chunk = *response.mutable_chunk();
      chunk.resize(std::min<uint64_t>(kFetchChunkBytes, source.size() - at));
      if (auto status = source.ReadAt(at, chunk.data(), chunk.size()); !status.ok()) return status;
      if (!writer.Write(response)) return absl::CancelledError("the client went away");
    }
    return absl::OkStatus();
  }

  runtime::UpdateManager& manager_;
  Telemetry& telemetry_;
  const AccessToken& token_;
  PushCalls pushes_;
  std::atomic<bool> closed_ = false;
  std::atomic<int> watches_ = 0, fetches_ = 0;
};

}  // namespace

std::unique_ptr<UpdateHandlers> MakeUpdateHandlers(runtime::UpdateManager& manager,
                                                   Telemetry& telemetry, const AccessToken& token,
                                                   PushLimits limits) {
  return std::make_unique<Handlers>(manager, telemetry, token, limits);
}

}  // namespace espalier::service
