#include "service/update_messages.h"

#include <algorithm>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/runtime/infer_request.h"
#include "engine/runtime/repository.h"

namespace espalier::service {
namespace {

template <typename Bytes>
std::string BytesOf(const Bytes& bytes) {
  return std::string(bytes.begin(), bytes.end());
}

v1::Version VersionMessage(const updates::VersionRecord& record) {
  v1::Version message;
  message.set_version(record.number);
  message.set_state(ToMessage(record.state));
  message.set_weights(BytesOf(record.weights));
  message.set_base(record.parent);
  message.set_sequence(record.sequence);
  message.set_replaced(record.replaced);
  message.set_seconds(record.seconds);
  if (record.parent != 0) message.set_delta_sha256(BytesOf(record.delta));
  message.set_delta_bytes(record.delta_bytes);
  for (const updates::KeyId& key : record.signers) message.add_signers(BytesOf(key));
  message.set_reason(record.reason);
  return message;
}

absl::Status InRange(absl::string_view field, double value, double most) {
  if (value >= 0 && value <= most) return absl::OkStatus();  // false for NaN
  return absl::InvalidArgumentError(
      absl::StrCat("probation.", field, " is ", value, ", expected 0 to ", most));
}

// To the microsecond, as it is kept; what nobody lives to see has no end.
absl::Duration DurationOf(double seconds) {
  constexpr double kNoEnd = 1e11;
  if (seconds >= kNoEnd) return absl::InfiniteDuration();
  return absl::Floor(absl::Seconds(seconds), absl::Microseconds(1));
}

// What does nothing without another field is a mistake, whose wish would be passed over in silence.
absl::Status CheckHasEffect(const v1::Probation& probation) {
  const bool share = probation.canary_share() > 0, duration = probation.canary_seconds() > 0;
  if (share != duration) {
    return absl::InvalidArgumentError(
        share ? "probation.canary_share needs canary_seconds: how long the canary lasts"
              : "probation.canary_seconds needs canary_share: how much the canary gets");
  }
  const bool judges = probation.max_error_rate() > 0 || probation.max_latency_ratio() > 0;
  if (!judges || share || probation.seconds() > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "probation.", probation.max_error_rate() > 0 ? "max_error_rate" : "max_latency_ratio",
      " needs seconds, or a canary: nothing is judged without"));
}

constexpr absl::Duration kLongestTransaction = absl::Hours(24);

// host:port of characters that addresses have; no scheme of gRPC's, such as a local path.
bool IsAddress(absl::string_view address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon == absl::string_view::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 1 || port > 65535) {
    return false;
  }
  const absl::string_view host = address.substr(0, colon);
  const bool bracketed = host.front() == '[' && host.back() == ']';
  return std::all_of(host.begin(), host.end(), [&](char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '-' || c == '_' ||
           (bracketed && (c == ':' || c == '[' || c == ']' || c == '%'));
  });
}

}  // namespace

absl::string_view AuthorizationOf(const grpc::ServerContextBase& context) {
  const auto found = context.client_metadata().find("authorization");
  if (found == context.client_metadata().end()) return {};
  return {found->second.data(), found->second.size()};
}

absl::Status CheckModelName(const std::string& model) {
  if (runtime::IsModelName(model)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("model is '", runtime::Printable(model),
                   "', expected 1 to 255 printable ASCII characters without '/', '\\' and '\"' and "
                   "no leading dot"));
}

absl::Status CheckVersion(int64_t version) {
  if (version > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("version is ", version, ", expected a number above zero"));
}

absl::StatusOr<updates::Digest> ReadDigest(absl::string_view field, absl::string_view bytes) {
  updates::Digest digest;
  if (bytes.size() != digest.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " has ", bytes.size(), " bytes, expected ", digest.size()));
  }
  std::copy(bytes.begin(), bytes.end(), digest.begin());
  return digest;
}

absl::StatusOr<runtime::ProbationOptions> ReadProbation(const v1::Probation& probation) {
  constexpr double kAny = std::numeric_limits<double>::infinity();
  for (const absl::Status& status :
       {InRange("seconds", probation.seconds(), kAny),
        InRange("canary_share", probation.canary_share(), 1),
        InRange("canary_seconds", probation.canary_seconds(), 86400),
        InRange("max_error_rate", probation.max_error_rate(), 1),
        InRange("max_latency_ratio", probation.max_latency_ratio(), 1e6)}) {
    if (!status.ok()) return status;
  }
  if (auto status = CheckHasEffect(probation); !status.ok()) return status;
  runtime::ProbationOptions options;
  options.duration = DurationOf(probation.seconds());
  options.canary_share = probation.canary_share();
  options.canary_duration = DurationOf(probation.canary_seconds());
  if (probation.max_error_rate() > 0) options.max_error_rate = probation.max_error_rate();
  options.max_latency_ratio = probation.max_latency_ratio();
  options.golden_requests = probation.golden_requests();
  return options;
}

v1::Probation ToMessage(const runtime::ProbationOptions& options) {
  v1::Probation message;
  message.set_seconds(absl::ToDoubleSeconds(options.duration));
  message.set_canary_share(options.canary_share);
  message.set_canary_seconds(absl::ToDoubleSeconds(options.canary_duration));
  message.set_max_error_rate(options.max_error_rate < 1 ? options.max_error_rate : 0);
  message.set_max_latency_ratio(options.max_latency_ratio);
  message.set_golden_requests(options.golden_requests);
  return message;
}

v1::VersionState ToMessage(updates::UpdateState state) {
  return static_cast<v1::VersionState>(state);  // the same numbers, see update_messages_test.cc
}

v1::ModelVersions ToMessage(const runtime::ModelVersions& versions) {
  v1::ModelVersions message;
  message.set_model(versions.store.model);
  message.set_serving(versions.serving);
  message.set_staged(versions.staged);
  message.set_shadow(versions.shadow);
  if (const auto& probation = versions.store.probation) {
    message.set_on_probation(true);
    const absl::Time ends = absl::FromUnixMicros(probation->until_micros);
    message.set_probation_ends(absl::ToUnixSeconds(ends + absl::Microseconds(999'999)));
  }
  message.set_accepted_sequence(versions.store.accepted_sequence);
  for (const updates::VersionRecord& record : versions.store.versions)
    *message.add_versions() = VersionMessage(record);
  return message;
}

v1::WatchVersionsResponse ToMessage(const runtime::VersionEvent& event) {
  v1::WatchVersionsResponse message;
  message.set_serial(event.serial);
  message.set_seconds(event.seconds);
  message.set_model(event.model);
  message.set_version(event.version);
  message.set_state(ToMessage(event.state));
  message.set_reason(event.reason);
  return message;
}

v1::AuditRecord ToMessage(const updates::AuditRecord& record) {
  v1::AuditRecord message;
  message.set_sequence(record.sequence);
  message.set_seconds(record.seconds);
  message.set_action(updates::NameOf(record.action));
  message.set_version(record.number);
  message.set_weights_before(BytesOf(record.before));
  message.set_weights_after(BytesOf(record.after));
  for (const updates::KeyId& key : record.signers) message.add_signers(BytesOf(key));
  message.set_reason(record.reason);
  return message;
}

v1::TransactionState ToMessage(updates::FleetDecision decision) {
  switch (decision) {
    case updates::FleetDecision::kUndecided:
      return v1::PREPARED;
    case updates::FleetDecision::kCommit:
      return v1::COMMITTED;
    case updates::FleetDecision::kAbort:
      return v1::ABORTED;
  }
  return v1::TRANSACTION_STATE_UNSPECIFIED;
}

v1::GetTransactionResponse ToMessage(const std::string& model,
                                     const updates::FleetTransaction& transaction) {
  v1::GetTransactionResponse message;
  v1::Transaction& fields = *message.mutable_transaction();
  fields.set_id(transaction.id);
  fields.set_model(model);
  fields.set_version(transaction.version);
  for (const std::string& address : transaction.participants) fields.add_participants(address);
  fields.set_expires_seconds(transaction.expires_seconds);
  if (transaction.probation != runtime::ProbationOptions())
    *fields.mutable_probation() = ToMessage(transaction.probation);
  message.set_state(ToMessage(transaction.decision));
  message.set_self(static_cast<int32_t>(transaction.self));
  message.set_done(transaction.done);
  return message;
}

absl::StatusOr<updates::FleetTransaction> ReadTransaction(
    const v1::PrepareTransactionRequest& request) {
  const v1::Transaction& message = request.transaction();
  if (auto status = CheckVersion(message.version()); !status.ok()) return status;
  updates::FleetTransaction transaction;
  transaction.id = message.id();
  transaction.version = message.version();
  for (const std::string& address : message.participants()) {
    if (!IsAddress(address)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "one of the participants is '", runtime::Printable(address), "', expected host:port"));
    }
    transaction.participants.push_back(address);
  }
  transaction.self = request.self();
  if (message.has_probation()) {
    const auto probation = ReadProbation(message.probation());
    if (!probation.ok()) return probation.status();
    transaction.probation = *probation;
  }
  transaction.expires_seconds = message.expires_seconds();
  const absl::Time latest = absl::Now() + kLongestTransaction;
  if (message.expires_seconds() > absl::ToUnixSeconds(latest)) {
    return absl::InvalidArgumentError(absl::StrCat("expires_seconds is ", message.expires_seconds(),
                                                   ", expected at most a day from now, ",
                                                   absl::ToUnixSeconds(latest)));
  }
  return transaction;
}

}  // namespace espalier::service
