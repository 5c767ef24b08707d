// status.h — the one place where the engine's absl::Status becomes the wire's grpc::Status.
#pragma once

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace espalier::service {

// The codes have the same numbers. An error never travels without a message (some clients take one
// without for success), nor with one so long that it would exceed the client's header limit.
grpc::Status ToGrpc(const absl::Status& status);

// "NOT_FOUND"; "UNKNOWN" for a number that is no code.
const char* CodeName(int code);

}  // namespace espalier::service
