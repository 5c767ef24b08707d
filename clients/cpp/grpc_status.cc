#include "clients/cpp/grpc_status.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace espalier::client {

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(
      static_cast<absl::StatusCode>(status.error_code()),
      status.error_message().empty() ? "the server gave no message" : status.error_message());
}

absl::Status CheckTarget(const std::string& target, absl::string_view example) {
  if (!target.empty() && !absl::StartsWith(target, "http://") &&
      !absl::StartsWith(target, "https://")) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "'", target, "' is no gRPC target; give host:port without a scheme, e.g. ", example));
}

}  // namespace espalier::client
