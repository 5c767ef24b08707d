// fake_update_server.h — an in-process update service that takes every delta as version 7, and fails
// where a test asks it to.
#pragma once

#include <grpcpp/grpcpp.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/espalier/v1/update.grpc.pb.h"

namespace espalier::testing {

class FakeUpdates final : public v1::UpdateService::Service {
 public:
  // What every fake of a fleet writes down, in the order in which it happens: "1 prepare", ….
  using Diary = std::vector<std::string>;

  explicit FakeUpdates(std::string name = "", Diary* diary = nullptr)
      : name_(std::move(name)), diary_(diary) {}

  std::string received;                       // of the delta that is pushed
  uint64_t cut_after = UINT64_MAX;            // UNAVAILABLE once it has so many bytes
  v1::VersionState state = v1::STAGED;        // what a push finds
  std::map<std::string, grpc::Status> fails;  // by "push", "activate", "prepare", "decide", …
  std::map<std::string, v1::TransactionState> states;  // by transaction
  v1::Transaction last;
  std::string last_authorization;
  std::vector<v1::FetchDeltasResponse> to_fetch;
  v1::ActivateVersionRequest activated;
  int pushes = 0;
  bool knows_probation = true;  // of transactions
  int64_t serves = 0;           // a version; 0: this server knows neither rollback nor lists

  grpc::Status PushDelta(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::PushDeltaResponse, v1::PushDeltaRequest>* stream) override {
    Note(*context);
    ++pushes;
    v1::PushDeltaRequest request;
    if (!stream->Read(&request) || !request.has_header()) return grpc::Status::CANCELLED;
    if (auto status = Fails("push"); !status.ok()) return status;
    const uint64_t bytes = request.header().bytes();
    v1::PushDeltaResponse response;
    if (state == v1::STAGED) {
      response.set_offset(received.size());
      stream->Write(response);
      while (stream->Read(&request)) {
        received += request.chunk();
        if (received.size() < cut_after) continue;
        cut_after = UINT64_MAX;
        return {grpc::StatusCode::UNAVAILABLE, "the link was cut"};
      }
      if (received.size() != bytes)
        return {grpc::StatusCode::INVALID_ARGUMENT, "bytes are missing"};
    }
    response.mutable_staged()->set_version(7);
    response.mutable_staged()->set_state(state);
    stream->Write(response);
    return grpc::Status::OK;
  }

  grpc::Status ActivateVersion(grpc::ServerContext* context,
                               const v1::ActivateVersionRequest* request,
                               v1::ActivateVersionResponse*) override {
    Note(*context);
    activated = *request;
    return Fails("activate");
  }

  grpc::Status Rollback(grpc::ServerContext* context, const v1::RollbackRequest* request,
                        v1::RollbackResponse* response) override {
    if (serves == 0) return v1::UpdateService::Service::Rollback(context, request, response);
    if (auto status = Fails("rollback"); !status.ok()) return status;
    serves = request->version() != 0 ? request->version() : serves - 1;
    response->set_version(serves);
    return grpc::Status::OK;
  }

  grpc::Status ListVersions(grpc::ServerContext* context, const v1::ListVersionsRequest* request,
                            v1::ListVersionsResponse* response) override {
    if (serves == 0) return v1::UpdateService::Service::ListVersions(context, request, response);
    auto& model = *response->add_models();
    model.set_model(request->model());
    model.set_serving(serves);
    return grpc::Status::OK;
  }

  grpc::Status FetchDeltas(grpc::ServerContext*, const v1::FetchDeltasRequest*,
                           grpc::ServerWriter<v1::FetchDeltasResponse>* writer) override {
    for (const auto& part : to_fetch) writer->Write(part);
    return Fails("fetch");
  }

  grpc::Status PrepareTransaction(grpc::ServerContext*,
                                  const v1::PrepareTransactionRequest* request,
                                  v1::PrepareTransactionResponse* response) override {
    const auto status = Did("prepare");
    if (!status.ok()) return status;
    last = request->transaction();
    response->set_probation(last.has_probation() && knows_probation);
    states.emplace(last.id(), v1::PREPARED);
    return status;
  }

  grpc::Status DecideTransaction(grpc::ServerContext*, const v1::DecideTransactionRequest* request,
                                 v1::DecideTransactionResponse* response) override {
    const auto status = Did(request->commit() ? "commit" : "abort");
    if (!status.ok()) return status;
    const auto known = states.find(request->id());
    if (known == states.end()) return {grpc::StatusCode::NOT_FOUND, "no such transaction"};
    const auto wish = request->commit() ? v1::COMMITTED : v1::ABORTED;
    if (known->second == v1::PREPARED) known->second = wish;
    if (known->second != wish) return {grpc::StatusCode::FAILED_PRECONDITION, "decided otherwise"};
    response->set_state(known->second);
    return status;
  }

  grpc::Status GetTransaction(grpc::ServerContext*, const v1::GetTransactionRequest* request,
                              v1::GetTransactionResponse* response) override {
    const auto known = states.find(request->id());
    if (known == states.end()) return {grpc::StatusCode::NOT_FOUND, "no such transaction"};
    *response->mutable_transaction() = last;
    response->set_state(known->second);
    return Fails("get");
  }

 private:
  void Note(const grpc::ServerContext& context) {
    const auto found = context.client_metadata().find("authorization");
    last_authorization.clear();
    if (found != context.client_metadata().end())
      last_authorization.assign(found->second.data(), found->second.size());
  }

  grpc::Status Fails(const std::string& what) const {
    const auto found = fails.find(what);
    return found == fails.end() ? grpc::Status::OK : found->second;
  }

  grpc::Status Did(const std::string& what) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    const auto status = Fails(what);
    if (diary_ != nullptr)
      diary_->push_back(absl::StrCat(name_, " ", what, status.ok() ? "" : " fails"));
    return status;
  }

  const std::string name_;
  Diary* const diary_;
};

// `service` on a free port.
class UpdateServerOf {
 public:
  explicit UpdateServerOf(FakeUpdates& service) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(&service);
    server_ = builder.BuildAndStart();
  }
  ~UpdateServerOf() { server_->Shutdown(std::chrono::system_clock::now()); }
  std::string url() const { return absl::StrCat("127.0.0.1:", port_); }

 private:
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace espalier::testing
