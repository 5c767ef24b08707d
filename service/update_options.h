// update_options.h — whether a server takes weight updates, whose, and how they come.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/runtime/update_manager.h"
#include "service/peers.h"
#include "service/update_access.h"
#include "service/update_server.h"

namespace espalier::service {

struct UpdateOptions {
  UpdateServerOptions listener;   // an empty address: none
  std::string token_file;         // empty: no token, and only loopback addresses
  std::vector<std::string> keys;  // files and directories of public keys
  int threshold = 1;              // so many of them must have signed
  bool allow_unsigned = false;
  absl::Duration deltas_poll_interval;  // of <model>/deltas/ in the repositories; zero: never

  bool enabled() const {
    return !listener.address.empty() || deltas_poll_interval > absl::ZeroDuration();
  }
};

// InvalidArgument for options that contradict one another or lack what they need.
absl::Status CheckUpdateOptions(const UpdateOptions& options, const std::string& state_dir);

// Reads the token; one that lets everybody in when there is no file.
absl::StatusOr<AccessToken> ReadToken(const UpdateOptions& options);

// Reads the keys. `options` are enabled and checked; `peers` outlive the manager, which asks them.
absl::StatusOr<std::unique_ptr<runtime::UpdateManager>> MakeUpdateManager(
    const UpdateOptions& options, const std::string& state_dir, Peers& peers);

}  // namespace espalier::service
