#include "service/update_options.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/runtime/log.h"
#include "service/update_access.h"

namespace espalier::service {

absl::Status CheckUpdateOptions(const UpdateOptions& options, const std::string& state_dir) {
  if (options.listener.address.empty() && !options.listener.catch_up_from.empty())
    return absl::InvalidArgumentError("--update_peers needs --update_address");
  if (!options.enabled()) {
    if (options.keys.empty() && !options.allow_unsigned && options.token_file.empty())
      return absl::OkStatus();
    return absl::InvalidArgumentError(
        "no update can come in: --update_address makes the server listen for them, "
        "--deltas_poll_interval makes it look into <model>/deltas/ of the repository");
  }
  if (state_dir.empty()) {
    return absl::InvalidArgumentError(
        "updates need --state_dir: what was activated must outlive the process");
  }
  if (options.keys.empty() && !options.allow_unsigned) {
    return absl::InvalidArgumentError(
        "whose updates? Give --update_keys with public keys (espalier keygen makes them), or "
        "--allow_unsigned_updates to take anybody's who can reach the server");
  }
  if (!options.keys.empty() && options.allow_unsigned) {
    return absl::InvalidArgumentError(
        "--update_keys and --allow_unsigned_updates contradict one another: with keys, what is not "
        "signed is refused");
  }
  return absl::OkStatus();
}

absl::StatusOr<AccessToken> ReadToken(const UpdateOptions& options) {
  if (options.token_file.empty()) return AccessToken();
  auto token = AccessToken::Read(options.token_file);
  if (token.ok()) return token;
  return absl::Status(token.status().code(),
                      absl::StrCat("--update_token_file: ", token.status().message()));
}

absl::StatusOr<std::unique_ptr<runtime::UpdateManager>> MakeUpdateManager(
    const UpdateOptions& options, const std::string& state_dir, Peers& peers) {
  runtime::UpdateManager::Options manager;
  manager.state_dir = state_dir;
  manager.poll_interval = options.deltas_poll_interval;
  manager.ask_participant = [&peers](const std::string& participant, const std::string& model,
                                     const std::string& id) {
    return peers.AskTransaction(participant, model, id);
  };
  if (options.allow_unsigned) {
    runtime::LogEvent(spdlog::level::warn,
                      "unsigned updates are taken: whoever reaches the listener or the repository "
                      "can change weights",
                      {});
  } else {
    auto trust = ReadTrust(options.keys, options.threshold);
    if (!trust.ok()) {
      return absl::Status(trust.status().code(),
                          absl::StrCat("--update_keys: ", trust.status().message()));
    }
    manager.trust = *std::move(trust);
  }
  return runtime::UpdateManager::Create(std::move(manager));
}

}  // namespace espalier::service
