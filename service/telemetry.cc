#include "service/telemetry.h"

#include "absl/strings/str_cat.h"
#include "engine/runtime/overload.h"

namespace espalier::service {

absl::Status InFlight::Enter(int64_t bytes) {
  const int64_t requests = requests_.fetch_add(1, std::memory_order_relaxed) + 1;
  const int64_t total = bytes_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  const bool too_many = limits_.max_requests > 0 && requests > limits_.max_requests;
  const bool too_large = limits_.max_bytes > 0 && requests > 1 && total > limits_.max_bytes;
  if (!too_many && !too_large) return absl::OkStatus();
  Leave(bytes);
  (too_many ? refused_for_requests_ : refused_for_bytes_).fetch_add(1, std::memory_order_relaxed);
  return runtime::OverloadError(
      too_many ? absl::StrCat("server is busy: ", requests - 1, " requests in flight, at most ",
                              limits_.max_requests, " may be")
               : absl::StrCat("server is busy: ", total - bytes,
                              " bytes of requests in flight, at most ", limits_.max_bytes,
                              " may be, and this request has ", bytes));
}

void InFlight::Leave(int64_t bytes) {
  requests_.fetch_sub(1, std::memory_order_relaxed);
  bytes_.fetch_sub(bytes, std::memory_order_relaxed);
}

}  // namespace espalier::service
