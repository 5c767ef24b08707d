// overload.h — refusals because too much waits already: not the request's fault, and over soon.
//
// Unavailable like others, and marked, so that the front end can tell them apart: it says when to
// come back, and answers them with the code that its operator chose.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace espalier::runtime {

inline constexpr char kOverloadPayload[] = "espalier/overload";

inline absl::Status OverloadError(absl::string_view message) {
  absl::Status status = absl::UnavailableError(message);
  status.SetPayload(kOverloadPayload, absl::Cord());
  return status;
}

inline bool IsOverload(const absl::Status& status) {
  return !status.ok() && status.GetPayload(kOverloadPayload).has_value();
}

}  // namespace espalier::runtime
