// update_line.h — one model's updates: its version store, where its repository's versions are, the copy
// of its weights that does not serve, what is counted.
//
//   Redirect        on a loader, one at a time: which version a load is to bring
//   MakeReady       with the model's turn: a version to flip to
//
// The store is opened when the model is loaded first, and stays open when it is unloaded.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/runtime/load_request.h"
#include "engine/runtime/model_manager.h"
#include "engine/runtime/other_copy.h"
#include "engine/runtime/update_statistics.h"
#include "engine/runtime/version_events.h"
#include "engine/updates/checkpoint.h"
#include "engine/updates/fleet_log.h"
#include "engine/updates/version_store.h"

namespace espalier::runtime {

class UpdateLine {
 public:
  struct Options {
    std::string state_dir;
    uint64_t max_delta_bytes = 0;
    updates::FileSystem* files = nullptr;
    // What the first participant of a transaction decided: its address, the model, the id.
    std::function<absl::StatusOr<updates::FleetDecision>(const std::string&, const std::string&,
                                                         const std::string&)>
        ask_participant;
    // How long an update waits for requests that hold the copy that it needs.
    absl::Duration patience = absl::Seconds(30);
  };

  UpdateLine(std::string model, Options options, VersionEvents& events)
      : model_(std::move(model)), options_(std::move(options)), events_(events) {}

  const std::string& model() const { return model_; }
  // FailedPrecondition, with the reason, for a model that takes no updates.
  absl::StatusOr<updates::VersionStore*> Store() const;
  // Of a model whose store is open.
  updates::FleetLog& fleet() const;
  static int64_t NowSeconds();
  // Decides what can be decided of a transaction that is undecided; blocks while it asks.
  absl::Status SettleFleet();
  OtherCopy& other_copy() { return other_copy_; }
  const OtherCopy& other_copy() const { return other_copy_; }
  UpdateCounts& counts() { return counts_; }
  const UpdateCounts& counts() const { return counts_; }

  // As UpdateHooks.
  void Redirect(const LoadRequest& request, const std::map<int64_t, VersionContent>& known,
                Inspection& found);
  // Tells watchers what changed in the store since it was called last.
  void Announce();

  // The version, ready to be flipped to; the active one itself when it is that. Takes the other copy.
  absl::StatusOr<VersionHandle> MakeReady(ModelManager& models, const ModelManager::Active& active,
                                          int64_t number);

 private:
  // What is known of a version of the repository.
  struct Base {
    std::string content;  // digest of its files when it was looked at
    updates::Digest weights{};
    std::shared_ptr<const updates::Checkpoint> checkpoint;
  };

  // --- update_line_open.cc ---
  std::string PathOf(int64_t version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<const updates::TensorReader>> OpenRepository(int64_t version);
  absl::StatusOr<updates::Digest> DigestOfBase(int64_t version, const std::string& content);
  absl::Status Open(const LoadRequest& request, const Inspection& found, int64_t highest);
  // Whether the repository's version is to become the active one.
  bool Admit(updates::VersionStore& store, int64_t highest, const Inspection& found);
  void LeadToActive(updates::VersionStore& store, const LoadRequest& request,
                    const std::map<int64_t, VersionContent>& known, int64_t highest,
                    Inspection& found);
  // What was decided while the server was down, before anything is served.
  void FollowFleet(updates::VersionStore& store);
  absl::Status CheckBase(const updates::VersionRecord& record, const std::string& content);

  // --- update_line.cc ---
  absl::StatusOr<std::unique_ptr<planner::PreparedModel>> Prepare(
      ModelManager& models, const ModelManager::Active& active, int64_t number, Shadow shadow);
  // The planner is asked again for what has drifted, whichever way the version is.
  void PlanDrifted(updates::VersionStore& store, planner::PreparedModel& model, int64_t number);
  // Without a shadow, into a clone of what serves.
  absl::Status EditShadow(updates::VersionStore& store, const ModelManager::Active& active,
                          Shadow& shadow, int64_t number);
  absl::StatusOr<std::unique_ptr<planner::PreparedModel>> LoadAnew(ModelManager& models,
                                                                   updates::VersionStore& store,
                                                                   const LoadJob& like,
                                                                   int64_t number);

  const std::string model_;
  const Options options_;
  VersionEvents& events_;
  OtherCopy other_copy_;
  UpdateCounts counts_;

  mutable std::mutex mutex_;
  std::string directory_ ABSL_GUARDED_BY(mutex_), filename_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, Base> bases_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<updates::VersionStore> store_ ABSL_GUARDED_BY(mutex_);  // once set, it stays
  std::unique_ptr<updates::FleetLog> fleet_ ABSL_GUARDED_BY(mutex_);      // likewise
  absl::Status no_store_ ABSL_GUARDED_BY(mutex_) =
      absl::FailedPreconditionError("it has not been loaded yet");
  std::map<int64_t, std::pair<updates::UpdateState, std::string>> announced_
      ABSL_GUARDED_BY(mutex_);
};

// Where the graph of a version comes from: the version of the repository that it was made from. 0: none.
int64_t RootOf(const updates::StoreState& state, int64_t version);

}  // namespace espalier::runtime
