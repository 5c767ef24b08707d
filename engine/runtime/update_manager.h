// update_manager.h — live models take weight updates: receive, verify, stage, activate, roll back.
//
//   BeginReceive / Append ──▶ Stage ──────────────▶ Activate ──▶ Confirm
//     bytes, durable          every check, journal     flip     ╲─▶ Rollback, Quarantine
//                             durable, shadow ready
//
// Two copies   A model that takes updates has two resident copies of its weights. One serves; the
//          other, the shadow, is where Stage writes the journal, and becomes a version of its own, with
//          queue and instances, which Activate publishes. Requests in flight finish on the version that
//          they started with; when the last one is answered, the copy that served is the shadow, one
//          version behind: rolling back is publishing it again, the next Stage catches it up.
// Truth    updates::VersionStore. The decision is durable before the flip; after a restart the model is
//          loaded at the version that the store says is active, and takes no request before.
// Numbers  Versions of the repository and of deltas share one number space. A version of the repository
//          above the active one is activated when it has loaded, as ever; one below is not.
// Errors   As VersionStore and updates::Receive; NotFound for a model that is not served. Whatever
//          fails, what served serves on.
// Threads  Thread-safe; everything may block on disk and on work for seconds, so never call it where
//          that matters. One update per model at a time: another one waits.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/updates/signing.h"
#include "engine/updates/version_store.h"

namespace espalier::runtime {

class ModelManager;

// What is asked of a version after its activation. Zero values ask nothing.
struct ProbationOptions {
  absl::Duration duration;  // 0: the version is confirmed at once. Infinite: until Confirm
  // Before the flip it answers this share of the requests that name no version, 0 to 1.
  double canary_share = 0;
  absl::Duration canary_duration;
  double max_error_rate = 1;         // share of failed requests, beyond the old version's
  double max_latency_ratio = 0;      // of the mean compute time over the old version's; 0: any
  bool golden_requests = false;      // <model>/golden/ of the repository must pass before the flip
};

// One change of a version's state, as watchers see it.
struct VersionEvent {
  int64_t serial = 0;  // rises by one
  int64_t seconds = 0;
  std::string model;
  int64_t version = 0;
  updates::UpdateState state = updates::UpdateState::kReceiving;
  std::string reason;
};

struct ModelVersions {
  updates::StoreState store;
  int64_t serving = 0;   // what a request without a version gets
  int64_t shadow = 0;    // the version the other resident copy is at; 0: there is none
  int64_t staged = 0;    // ready to flip to; 0: none
};

// By model, for metrics.
struct UpdateStatistics {
  std::string model;
  uint64_t staged = 0, activated = 0, rolled_back = 0, quarantined = 0;
  std::vector<std::pair<std::string, uint64_t>> refused;  // by reason, a bounded set of words
  uint64_t received_bytes = 0;
  uint64_t edited = 0, rebuilt = 0;       // updates that went into the shadow in place, or anew
  double stage_seconds = 0, commit_seconds = 0;  // sums
  int64_t version = 0, sequence = 0;
  bool on_probation = false;
};

class UpdateManager {
 public:
  struct Options {
    std::string state_dir;  // not empty
    // Who must have signed; none: unsigned deltas are accepted.
    std::optional<updates::TrustPolicy> trust;
    uint64_t max_delta_bytes = uint64_t{4} << 30;
    // Of versions that are activated without options of their own, such as those of deltas/.
    ProbationOptions probation;
    // How often to look into <model>/deltas/ of the repositories; zero: never.
    absl::Duration poll_interval;
    updates::FileSystem* files = &updates::PosixFileSystem();
  };

  // `models` outlives it, and asks it which weights a model starts with (ModelManager::Options).
  static absl::StatusOr<std::unique_ptr<UpdateManager>> Create(Options options);
  ~UpdateManager();
  void Attach(ModelManager& models);

  // `file` is the SHA-256 of the delta's bytes. Returns the offset to go on at.
  absl::StatusOr<uint64_t> BeginReceive(const std::string& model, const updates::Digest& file,
                                        uint64_t bytes);
  absl::Status Append(const std::string& model, const updates::Digest& file, uint64_t offset,
                      absl::string_view bytes);
  absl::Status Abandon(const std::string& model, const updates::Digest& file);
  // Checks what was received, makes it durable and brings the shadow to it. The version's number; a
  // version that is staged or served already is an OK with its number.
  absl::StatusOr<int64_t> Stage(const std::string& model, const updates::Digest& file);

  // Flips. FailedPrecondition unless it is staged, or served before and is not quarantined.
  absl::Status Activate(const std::string& model, int64_t version,
                        std::optional<ProbationOptions> probation = std::nullopt);
  // To `to`, or with 0 to what the active version replaced. The number of what serves then.
  absl::StatusOr<int64_t> Rollback(const std::string& model, absl::string_view reason,
                                   int64_t to = 0);
  absl::Status Confirm(const std::string& model, int64_t version);
  // Gives a version up that has not served.
  absl::Status Refuse(const std::string& model, int64_t version, absl::string_view reason);

  // Of one model, or with "" of all that take updates.
  absl::StatusOr<std::vector<ModelVersions>> List(absl::string_view model) const;
  absl::StatusOr<std::vector<updates::AuditRecord>> Audit(const std::string& model,
                                                          size_t most) const;
  // The deltas that lead from a version to the active one; see VersionStore::DeltasBetween.
  absl::StatusOr<std::vector<updates::StoredDelta>> DeltasFrom(const std::string& model,
                                                               int64_t from) const;
  // Events after `serial` (0: those kept, the newest 1,024), of one model or with "" of all; waits
  // until there is one, the time is up (none then), or the manager stops (Cancelled).
  absl::StatusOr<std::vector<VersionEvent>> EventsAfter(int64_t serial, absl::string_view model,
                                                        absl::Time until) const;
  std::vector<UpdateStatistics> Statistics() const;
  // Ends waits and probations; what is staged stays so.
  void Stop();
};

}  // namespace espalier::runtime
