// malformed_calls.h — what a caller of espalier.v1.UpdateService hears whose message is no protobuf.
//
// gRPC parses the messages of methods that block, and by itself answers INTERNAL without a text, past
// every handler and counter. None of our handlers ends a call like that (see status.h), so a call that
// is about to end so is one of these: it is answered INVALID_ARGUMENT, or UNAUTHENTICATED, and counted.
#pragma once

#include <memory>
#include <vector>

#include "grpcpp/support/server_interceptor.h"
#include "service/telemetry.h"
#include "service/update_access.h"

namespace espalier::service {

// For a ServerBuilder. Both outlive the server.
std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
MakeMalformedCallAnswers(Telemetry& telemetry, const AccessToken& token);

}  // namespace espalier::service
