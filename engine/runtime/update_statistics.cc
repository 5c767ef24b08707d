#include "engine/runtime/update_statistics.h"

namespace espalier::runtime {

const char* RefusalWord(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      return "invalid";
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

UpdateStatistics UpdateCounts::Read() const {
  const std::lock_guard lock(mutex_);
  UpdateStatistics read = counts_;
  read.refused.assign(refused_.begin(), refused_.end());
  return read;
}

}  // namespace espalier::runtime
