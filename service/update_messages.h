// update_messages.h — the engine's versions, states and records as messages of espalier.v1, and what
// clients send, checked.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/runtime/update_manager.h"
#include "engine/updates/fleet_log.h"
#include "grpcpp/server_context.h"
#include "proto/espalier/v1/update.pb.h"

namespace espalier::service {

// The metadata "authorization"; empty when there is none.
absl::string_view AuthorizationOf(const grpc::ServerContextBase& context);

// InvalidArgument, naming the field, for what cannot be one.
absl::Status CheckModelName(const std::string& model);
absl::Status CheckVersion(int64_t version);
absl::StatusOr<updates::Digest> ReadDigest(absl::string_view field, absl::string_view bytes);
absl::StatusOr<runtime::ProbationOptions> ReadProbation(const v1::Probation& probation);
v1::Probation ToMessage(const runtime::ProbationOptions& options);

v1::VersionState ToMessage(updates::UpdateState state);
v1::ModelVersions ToMessage(const runtime::ModelVersions& versions);
v1::WatchVersionsResponse ToMessage(const runtime::VersionEvent& event);
v1::AuditRecord ToMessage(const updates::AuditRecord& record);
v1::TransactionState ToMessage(updates::FleetDecision decision);
v1::GetTransactionResponse ToMessage(const std::string& model,
                                     const updates::FleetTransaction& transaction);
// What can be checked without knowing the model: names, addresses, the expiry.
absl::StatusOr<updates::FleetTransaction> ReadTransaction(
    const v1::PrepareTransactionRequest& request);

}  // namespace espalier::service
