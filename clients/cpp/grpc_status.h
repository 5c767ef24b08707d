// grpc_status.h — what the clients share: gRPC's statuses as ours, and targets.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/status.h"

namespace espalier::client {

// Both enums are the canonical codes with the same numbers. A server that fails without a text
// still gets one here.
absl::Status FromGrpc(const grpc::Status& status);

// InvalidArgument for a target that can never work. `example` is one that can.
absl::Status CheckTarget(const std::string& target, absl::string_view example);

}  // namespace espalier::client
