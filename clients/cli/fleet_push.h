// fleet_push.h — a version that is staged on several servers serves on all of them, or on none.
//
//   prepare the first, then the others ──▶ the first decides, durably ──▶ the others commit
//        any refuses: abort                     from here on it is done, whoever dies
//
// Golden requests and a canary come with the preparation; once committed, each server judges a version on
// probation for itself, and goes back alone.
//
// A server that misses the decision asks the first one for it; until it knows, it serves what it
// served. What a dead client left is finished by Resume, which needs no delta.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "clients/cli/update_servers.h"

namespace espalier::cli {

struct FleetVersion {
  std::string model;
  int64_t version = 0;
  std::string weights;  // digest, which every server must have staged
  absl::Duration expiry = absl::Minutes(5);
  std::optional<v1::Probation> probation;
};

// How long the canaries of so many servers take: the first one's, then the others', some at once.
absl::Duration CanaryTime(size_t servers, const v1::Probation& probation);

// Runs `work(i)` for every client, some at once. Every error is printed; the first one returned, as
// Explain says it.
absl::Status InParallel(const UpdateClients& clients,
                        const std::function<absl::Status(size_t)>& work);

// `clients` are two or more; the first one decides. OK when all serve the version. Aborted: none does.
// Any other code says, with the transaction's id, what stands and what to do.
absl::Status CommitOnAll(const UpdateClients& clients, const FleetVersion& version);

// Finishes the transaction, as any of `clients` knows it: commits it when every participant is
// prepared, else aborts it. `connect` makes the participants' clients.
using ConnectTo = std::function<absl::StatusOr<UpdateClients>(const std::vector<std::string>&)>;
absl::Status Resume(const UpdateClients& clients, const std::string& id, const ConnectTo& connect);

}  // namespace espalier::cli
