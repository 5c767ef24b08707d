// update_server.h — the listener of espalier.v1.UpdateService: apart from the one of inference, with
// threads, limits and a token of its own, so that neither waits for the other.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/runtime/update_manager.h"
#include "service/peers.h"
#include "service/push_delta.h"
#include "service/telemetry.h"
#include "service/update_access.h"

namespace grpc {
class Server;
}

namespace espalier::service {

class UpdateHandlers;

struct UpdateServerOptions {
  std::string address;                     // host:port
  std::vector<std::string> catch_up_from;  // update addresses of other servers
  PushLimits push;
};

class UpdateServer {
 public:
  // `peers`, `manager` and `telemetry` outlive it. InvalidArgument for an address that others reach
  // without a token.
  static absl::StatusOr<std::unique_ptr<UpdateServer>> Start(UpdateServerOptions options,
                                                             AccessToken token, Peers& peers,
                                                             runtime::UpdateManager& manager,
                                                             Telemetry& telemetry);
  ~UpdateServer();

  int port() const { return port_; }
  // Takes from the first peer that answers the versions that this server lacks, then calls `ready`; at
  // once when there are no peers. Once; not after Stop.
  void CatchUp(std::function<void()> ready);
  // Ends what is open with Unavailable, then closes the connections. What `manager` does is not
  // waited for here: stop it too.
  void Stop();

 private:
  UpdateServer(UpdateServerOptions options, AccessToken token, Peers& peers,
               runtime::UpdateManager& manager);

  const UpdateServerOptions options_;
  const AccessToken token_;
  Peers& peers_;
  runtime::UpdateManager& manager_;
  std::unique_ptr<UpdateHandlers> handlers_;
  std::unique_ptr<grpc::Server> grpc_;
  int port_ = 0;
  std::mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread catching_up_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace espalier::service
