// infer_message.h — inference requests and results as the protocol's messages.
//
// Limits   Tensors of less than 2 GiB − 1 bytes in one request (protobuf's limit).
// Errors   InvalidArgument: the request contradicts itself. Internal: the answer does (bytes against
//          shape, no raw contents).
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "clients/cpp/client.h"

namespace espalier::client {

absl::Status ToMessage(const InferRequest& from, inference::ModelInferRequest* to);
// Takes the names and bytes out of `from`.
absl::StatusOr<InferResult> FromMessage(inference::ModelInferResponse& from);

}  // namespace espalier::client
