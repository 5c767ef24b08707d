#include "service/status.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

namespace espalier::service {
namespace {

// Messages travel percent-encoded in headers, of which clients take 8 KiB by default.
constexpr size_t kMaxMessageBytes = 2048;

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  size_t kept = std::min(status.message().size(), kMaxMessageBytes);
  // Not in the middle of a character: in a stream the message is a protobuf string.
  while (kept < status.message().size() && (status.message()[kept] & 0xc0) == 0x80) --kept;
  std::string message(status.message().substr(0, kept));
  if (message.size() < status.message().size()) message += "...";
  if (message.empty())
    message = absl::StrCat("failed with ", absl::StatusCodeToString(status.code()));
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::move(message));
}

const char* CodeName(int code) {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  return code >= 0 && code < static_cast<int>(std::size(kNames)) ? kNames[code] : "UNKNOWN";
}

}  // namespace espalier::service
