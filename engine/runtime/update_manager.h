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
// Plans    A version that is new gets the plan that its structure calls for: what has drifted is planned again while the
//          shadow is brought to it, in the background, and if that fails it runs with the plan that the shadow has.
// Truth    updates::VersionStore. The decision is durable before the flip; after a restart the model is
//          loaded at the version that the store says is active, and takes no request before.
// Numbers  Versions of the repository and of deltas share one number space. A version of the repository
//          above the active one is activated when it has loaded, as ever; one below is not.
// Errors   As VersionStore and updates::Receive; NotFound for a model that is not served. Whatever
//          fails, what served serves on.
// Threads  Thread-safe; everything may block on disk and on work for seconds, so never call it where
//          that matters. One update per model at a time: another one waits.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/runtime/delta_folder.h"
#include "engine/runtime/model_manager.h"
#include "engine/runtime/update_hooks.h"
#include "engine/runtime/update_line.h"
#include "engine/runtime/update_probation.h"
#include "engine/runtime/update_statistics.h"
#include "engine/runtime/version_events.h"
#include "engine/updates/fleet_log.h"
#include "engine/updates/signing.h"
#include "engine/updates/version_store.h"

namespace espalier::runtime {

struct ModelVersions {
  updates::StoreState store;
  int64_t serving = 0;  // what a request without a version gets
  int64_t shadow = 0;   // the version the other resident copy is at; 0: there is none
  int64_t staged = 0;   // ready to flip to; 0: none
};

class UpdateManager final : public UpdateHooks {
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
    // What the first participant of a fleet's transaction decided: its address, the model, the id.
    // NotFound: it knows none; another error: ask again later. May take seconds.
    std::function<absl::StatusOr<updates::FleetDecision>(
        const std::string& participant, const std::string& model, const std::string& id)>
        ask_participant;
  };

  // It outlives `models`, whose options name it (ModelManager::Options), and which stops it. To be
  // attached before they start.
  static absl::StatusOr<std::unique_ptr<UpdateManager>> Create(Options options);
  ~UpdateManager() override;
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

  // Flips. FailedPrecondition unless it is staged, or served before and is not quarantined: then it serves again at once,
  // InvalidArgument with a probation.
  absl::Status Activate(const std::string& model, int64_t version,
                        std::optional<ProbationOptions> probation = std::nullopt);
  // To `to`, or with 0 to what the active version replaced. The number of what serves then.
  absl::StatusOr<int64_t> Rollback(const std::string& model, absl::string_view reason,
                                   int64_t to = 0);
  absl::Status Confirm(const std::string& model, int64_t version);
  // Gives a version up that has not served.
  absl::Status Refuse(const std::string& model, int64_t version, absl::string_view reason);

  // --- one update on many servers, or on none; fleet_log.h has the protocol ---
  // Promises that a staged version will be activated if so decided: it is ready, and until then
  // nothing else is activated or rolled back here. Golden requests and a canary of its probation come
  // first; the rest of the probation begins when a commit is carried out. FailedPrecondition when it
  // cannot be promised, or another transaction is open. Once OK, the same again is an OK.
  absl::Status Prepare(const std::string& model, updates::FleetTransaction transaction);
  // Makes the decision durable, then carries it out. FailedPrecondition when it was decided otherwise,
  // which on the first participant a commit after the expiry was. Any other error after the decision:
  // it stands, and is carried out as soon as that can be.
  absl::StatusOr<updates::FleetTransaction> Decide(const std::string& model, const std::string& id,
                                                   updates::FleetDecision decision);
  // What is known of it: what another participant is told that asks.
  absl::StatusOr<updates::FleetTransaction> Transaction(const std::string& model,
                                                        const std::string& id) const;

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
  void Stop() override;

  // For ModelManager.
  void Redirect(const std::string& model, const LoadRequest& request,
                const std::map<int64_t, VersionContent>& known, Inspection& found) override;
  void BeforeLoad(const std::string& model) override;
  absl::Status BeforePublish(const std::string& model, int64_t version) override;
  void Unloaded(const std::string& model) override;
  void Retired(const ServedVersion* version,
               std::unique_ptr<planner::PreparedModel> model) override;

 private:
  using LinePtr = std::shared_ptr<UpdateLine>;
  // What Stop waits for.
  class Operation {
   public:
    explicit Operation(const UpdateManager& manager);
    ~Operation();
    Operation(const Operation&) = delete;
    // Unavailable when the manager stops.
    const absl::Status& status() const { return status_; }

   private:
    const UpdateManager& manager_;
    absl::Status status_;
  };
  // A model whose store is open.
  struct Opened {
    std::unique_ptr<Operation> operation;
    LinePtr line;
    updates::VersionStore* store;
  };
  // One whose turn it is, with what serves.
  struct Held {
    std::unique_ptr<ModelManager::Turn> turn;
    ModelManager::Active active;
    updates::StoreState state;
  };

  explicit UpdateManager(Options options) : options_(std::move(options)) {}
  absl::StatusOr<Opened> Open(absl::string_view model) const;
  // NotFound for a model that was never loaded.
  absl::StatusOr<LinePtr> Line(absl::string_view model) const;
  std::vector<LinePtr> Lines() const;
  bool stopping() const;

  // --- update_manager.cc ---
  updates::ReceivePolicy Policy() const;
  absl::StatusOr<int64_t> StageFile(const Opened& opened, const updates::Digest& file, bool tell);
  absl::StatusOr<int64_t> VerifyAndStage(const Opened& opened, const updates::Digest& file);
  absl::Status MakeStagedReady(const Opened& opened, int64_t version);

  // --- update_manager_decide.cc ---
  absl::StatusOr<Held> Hold(const Opened& opened) const;
  absl::Status CheckActivation(const updates::StoreState& state, int64_t version) const;
  // The decision, then the flip; the decision is undone when the flip cannot be.
  absl::Status Flip(const Opened& opened, const Held& held, const VersionHandle& next,
                    absl::FunctionRef<absl::Status()> decide);
  // A version that has passed what comes before: the decision, its probation, the flip.
  absl::Status MakeActive(const Opened& opened, const Held& held, const VersionHandle& next,
                          const ProbationOptions& terms);
  // Golden requests and canary. A version that fails is quarantined.
  absl::Status Try(const Opened& opened, const Held& held, const VersionHandle& next,
                   const ProbationOptions& terms);
  absl::Status Canary(const Opened& opened, const Held& held, const VersionHandle& next,
                      const ProbationOptions& terms);
  // The active version, which has failed, is given up for good.
  absl::Status Revert(const Opened& opened, int64_t version, const std::string& reason);

  // --- update_manager_fleet.cc ---
  absl::Status CheckNotPromised(const Opened& opened) const;
  absl::Status CarryOut(const Opened& opened, const updates::FleetTransaction& transaction);
  void AskUntilStopped();

  // --- update_manager_watch.cc ---
  void JudgeUntilStopped();
  void LookUntilStopped();
  bool WaitFor(absl::Duration duration);  // false: the manager stops
  void JudgeProbations();
  void EndWatch(const std::string& model, int64_t active);
  void Judge(const Opened& opened, int64_t version, const updates::Probation& probation);
  // What serves of the version on probation, and what it did since it was activated.
  Conduct ConductOnProbation(const std::string& model, int64_t version);
  void TakeDeltas(const Opened& opened, DeltaFolder& folder);
  absl::Status TakeDelta(const Opened& opened, const DeltaFolder::File& file, bool first);
  static int64_t StateOf(const Opened& opened);
  absl::Status ReceiveFile(const std::string& model, const DeltaFolder::File& file);

  const Options options_;
  ModelManager* models_ = nullptr;
  VersionEvents events_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::map<std::string, LinePtr, std::less<>> lines_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, OnProbation> probations_ ABSL_GUARDED_BY(mutex_);  // by model
  mutable int operations_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::string, DeltaFolder> folders_;  // by model; of the thread that looks into them
  std::thread judge_, look_, ask_;
};

}  // namespace espalier::runtime
