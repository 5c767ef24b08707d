#include "service/status.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace espalier::service {
namespace {

// Messages travel percent-encoded in headers, of which clients take 8 KiB by default.
constexpr size_t kMaxMessageBytes = 2048;

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string message(status.message().substr(0, kMaxMessageBytes));
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
