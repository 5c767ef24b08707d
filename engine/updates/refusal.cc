#include "engine/updates/refusal.h"

#include "absl/strings/cord.h"

namespace espalier::updates {
namespace {

constexpr absl::string_view kPayload = "espalier/refusal";

}  // namespace

absl::Status Because(absl::string_view word, absl::Status status) {
  if (!status.ok() && !status.GetPayload(kPayload)) status.SetPayload(kPayload, absl::Cord(word));
  return status;
}

std::string RefusalWord(const absl::Status& status) {
  if (const auto word = status.GetPayload(kPayload)) return std::string(*word);
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      return "damaged";
    case absl::StatusCode::kPermissionDenied:
      return "not_signed";
    case absl::StatusCode::kFailedPrecondition:
      return "does_not_fit";
    case absl::StatusCode::kUnimplemented:
      return "newer_format";
    case absl::StatusCode::kResourceExhausted:
      return "too_large";
    default:
      return "other";
  }
}

}  // namespace espalier::updates
