// update_client.h — a client of espalier.v1.UpdateService: pushes deltas, activates versions, tells
// what there is.
//
//   auto client = UpdateClient::Create("127.0.0.1:8003", {.token = token});
//   auto staged = (*client)->Push({model, sha256, bytes, read}, progress);
//   (*client)->Activate("digits", staged->version());
//
// Errors   The server's status code and text, unchanged. A push whose connection breaks goes on
//          where the server got to, until it gets nowhere for a while.
// Thread-safe: all methods, from any thread. Calls share one connection.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/espalier/v1/update.grpc.pb.h"

namespace espalier::client {

struct UpdateClientOptions {
  std::string token;                            // empty: none is sent
  absl::Duration deadline = absl::Seconds(60);  // of calls that are no streams
};

// A delta to send.
struct PushSource {
  std::string model;
  std::string sha256;  // 32 bytes, of all
  uint64_t bytes = 0;
  std::function<absl::Status(uint64_t offset, char* to, size_t bytes)> read;
};

class UpdateClient {
 public:
  // InvalidArgument for a target that can never work; the connection is made by the first call.
  static absl::StatusOr<std::unique_ptr<UpdateClient>> Create(const std::string& target,
                                                              UpdateClientOptions options = {});

  const std::string& target() const { return target_; }

  // `progress` is told how many bytes the server has, or will have when they arrive. May be empty.
  absl::StatusOr<v1::StagedVersion> Push(const PushSource& source,
                                         const std::function<void(uint64_t)>& progress = {});
  absl::Status Activate(const std::string& model, int64_t version,
                        const std::optional<v1::Probation>& probation = std::nullopt);
  // To `version`, or with 0 to what the active one replaced. Returns what serves now.
  absl::StatusOr<int64_t> Rollback(const std::string& model, const std::string& reason,
                                   int64_t version = 0);
  absl::Status Confirm(const std::string& model, int64_t version);
  // Of one model, or with "" of all that take updates.
  absl::StatusOr<v1::ListVersionsResponse> List(const std::string& model);
  absl::StatusOr<v1::ReadAuditResponse> Audit(const std::string& model, int most);
  // Until the server ends it, or `each` answers false (then OK). No deadline.
  absl::Status Watch(const std::string& model, int64_t after_serial,
                     const std::function<bool(const v1::WatchVersionsResponse&)>& each);
  // A header, then its bytes, for each delta. Ends with the first error of `each`. No deadline.
  absl::Status Fetch(const std::string& model, int64_t from_version,
                     const std::function<absl::Status(const v1::FetchDeltasResponse&)>& each);

  // A fleet's two phases; `self`: which of the transaction's participants this server is. A server that
  // promises without the probation that is asked for is a FailedPrecondition.
  absl::Status Prepare(const v1::Transaction& transaction, int self);
  absl::StatusOr<v1::TransactionState> Decide(const v1::Transaction& transaction, bool commit);
  // Of whichever model.
  absl::StatusOr<v1::GetTransactionResponse> GetTransaction(const std::string& id);

 private:
  UpdateClient(std::string target, UpdateClientOptions options,
               std::unique_ptr<v1::UpdateService::Stub> stub)
      : target_(std::move(target)), options_(std::move(options)), stub_(std::move(stub)) {}

  void Authorize(grpc::ClientContext& context) const;
  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(grpc::Status (v1::UpdateService::Stub::*method)(
                                    grpc::ClientContext*, const Request&, Response*),
                                const Request& request,
                                absl::Duration extra = absl::ZeroDuration()) const;
  absl::StatusOr<v1::StagedVersion> PushOnce(const PushSource& source,
                                             const std::function<void(uint64_t)>& progress,
                                             std::optional<uint64_t>& offset) const;

  static absl::Status EndWithoutAnswer(const grpc::Status& end);

  const std::string target_;
  const UpdateClientOptions options_;
  const std::unique_ptr<v1::UpdateService::Stub> stub_;
};

}  // namespace espalier::client
