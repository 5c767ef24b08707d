// update_service.h — espalier.v1.UpdateService: the handlers. Everything but PushDelta may block on
// disk and work, so it has threads of its own, on a listener of its own (update_server.h).
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "engine/runtime/update_manager.h"
#include "grpcpp/impl/service_type.h"
#include "service/push_delta.h"
#include "service/telemetry.h"
#include "service/update_access.h"

namespace espalier::service {

// Streams that clients may keep open for as long as they like, each with a thread.
inline constexpr int kMaxWatches = 32;
inline constexpr int kMaxFetches = 8;

class UpdateHandlers {
 public:
  virtual ~UpdateHandlers() = default;
  virtual grpc::Service& service() = 0;
  // Ends what is open with `why`, and what comes after it.
  virtual void EndAll(const absl::Status& why) = 0;
};

// Behind an interface, because the generated headers are heavy. All outlive it.
std::unique_ptr<UpdateHandlers> MakeUpdateHandlers(runtime::UpdateManager& manager,
                                                   Telemetry& telemetry, const AccessToken& token,
                                                   PushLimits limits);

}  // namespace espalier::service
