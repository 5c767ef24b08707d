// peers.h — other servers of a fleet, asked by this one: what a transaction came to, which version they
// serve, and the deltas that lead there.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/runtime/update_manager.h"
#include "proto/espalier/v1/update.grpc.pb.h"

namespace espalier::service {

// Thread-safe. Every call waits for a peer, though never for long.
class Peers {
 public:
  // `authorization` is sent with every call, unless it is empty.
  explicit Peers(std::string authorization) : authorization_(std::move(authorization)) {}

  // What it knows of a transaction: see UpdateManager::Options::ask_participant.
  absl::StatusOr<updates::FleetDecision> AskTransaction(const std::string& peer,
                                                        const std::string& model,
                                                        const std::string& id);
  // Brings each model of `manager` to the version that the peer serves: receives the deltas between,
  // and activates. OK also for models that the peer has not, or that are there already; else the
  // first error, after all were tried.
  absl::Status CatchUp(const std::string& peer, runtime::UpdateManager& manager);

 private:
  v1::UpdateService::Stub& StubOf(const std::string& peer);
  void Prepare(grpc::ClientContext& context, absl::Duration deadline) const;
  absl::Status CatchUp(const std::string& peer, runtime::UpdateManager& manager,
                       const runtime::ModelVersions& own, const v1::ModelVersions& theirs);
  absl::Status Receive(const std::string& peer, runtime::UpdateManager& manager,
                       const runtime::ModelVersions& own);

  const std::string authorization_;
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<v1::UpdateService::Stub>> stubs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace espalier::service
