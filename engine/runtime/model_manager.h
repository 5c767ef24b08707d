// model_manager.h — every model of the repositories: loads, swaps and unloads them on threads of its
// own, hands out handles to versions.
//
//   Load ──▶ the model's line ──▶ inspect ──▶ per version that changed: load, plan, start instances,
//            (one at a time)      config,        warm up ──▶ publish (swap)
//                                 policy,                        │ all of them well
//                                 content                        ▼
//                                                      unload what is no longer selected ──▶ answer
//
// What serves keeps serving until what follows is ready, also when both have one number; a load
// that fails leaves its reason in the index and everything else as it was. A version whose content
// is what is served already is not loaded again. A version whose last handle is dropped (unloaded
// or replaced, and every request that held it answered) is torn down on a loader thread.
//
// Threads  Loaders do what takes long. Once the server has started they work in the background
//          (thread_priority.h), and so never touch the mutex, for which requests would then wait:
//          every change of state happens on one thread of normal priority, the control thread. It
//          also makes the instances, whose threads inherit its priority.
#pragma once

#include <array>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/runtime/load_line.h"
#include "engine/runtime/load_request.h"
#include "engine/runtime/model_loader.h"
#include "engine/runtime/repository_watch.h"
#include "engine/runtime/served_version.h"
#include "engine/runtime/update_hooks.h"
#include "engine/runtime/version_state.h"
#include "engine/runtime/worker_pool.h"

namespace espalier::runtime {

class ModelManager {
 public:
  struct Options {
    std::vector<std::string> repositories;
    int loader_threads = 4;  // loads that run at once
    int64_t default_max_pending =
        0;  // waiting requests per version without a max_queue_size of its own; 0: no limit
    // That the front end answers overloads with (overload.h): versions count them so.
    absl::StatusCode overload_code = absl::StatusCode::kUnavailable;
    // Time for measuring kernels at start, shared by the models that are loaded then. Later loads
    // have it while no model serves, and none while one does: measuring takes all cores.
    int64_t measure_budget_millis = 3000;
    // The models that Start loads, by name; none: all of them.
    std::optional<std::vector<std::string>> load_at_start;
    // How often to look for changes in the repositories; zero: never, they are read at start.
    absl::Duration poll_interval;
    // Called once, when every load that Start began has ended, well or not; on the control thread,
    // or in Start when there was nothing to load.
    std::function<void()> on_started;
    // Who updates the weights of models that serve; outlives the manager, which stops it. Null: nobody.
    UpdateHooks* updates = nullptr;
  };

  struct IndexEntry {
    std::string name;
    int64_t version = 0;  // 0: the model has no version
    VersionState state = VersionState::kUnknown;
    std::string reason;
  };

  ModelManager(Options options, std::unique_ptr<ModelLoader> loader);
  // Unloads everything and waits for it, running loads included. All handles must be gone.
  ~ModelManager();

  // Lists the repositories and begins to load. NotFound or PermissionDenied when one cannot be
  // listed, NotFound for a model of load_at_start that is in none; a model found in two of them is
  // refused (its reason names both).
  absl::Status Start();

  // Whether every load that Start began has ended.
  bool started() const;

  // The version to answer from; "" means the active one: what updates led to, else the highest that
  // is ready; or its canary, for that one's share of the calls. Errors:
  // InvalidArgument for a version that is no number, NotFound for an unknown model or version,
  // Unavailable for one that is not ready.
  absl::StatusOr<VersionHandle> Find(absl::string_view model, absl::string_view version) const;
  // The versions of a model that are ready, ascending.
  std::vector<int64_t> ReadyVersions(absl::string_view model) const;
  // Every ready version of every model, by name and version.
  std::vector<VersionHandle> AllReady() const;
  // The ready versions that a question names: of all models when `model` is empty, all of the
  // model's when `version` is. Errors as in Find.
  absl::StatusOr<std::vector<VersionHandle>> Select(absl::string_view model,
                                                    absl::string_view version) const;

  // What the repositories hold and in which state, by name and version.
  std::vector<IndexEntry> Index() const;
  // Latency of every model in the index.
  std::vector<std::pair<std::string, std::shared_ptr<const ModelLatency>>> Latencies() const;
  // Loads that have ended, by the code of their outcome: Load's, Start's and polling's.
  using LoadsByCode = std::array<uint64_t, VersionStatistics::kCodes>;
  LoadsByCode loads_by_code() const;

  // Answered once, perhaps before Load returns, on a thread that `done` must not block.
  using Done = LoadOperation::Done;
  // Makes the model serve what its repository holds now, or what the request brings. OK when every
  // version that it asks for is ready. Errors begin with "failed to load 'model'": InvalidArgument
  // for a name that is none, NotFound for a model that is in no repository, ResourceExhausted when
  // too many loads wait, Aborted when an unload overtook this one, else what kept a version from
  // loading.
  void Load(const std::string& model, LoadRequest request, Done done);
  // No new request finds the model, or this version of it; the memory goes when those that hold it
  // are answered. Overtakes loads of the same. Returns at once. NotFound for an unknown model or
  // version.
  absl::Status Unload(absl::string_view model, std::optional<int64_t> version = std::nullopt);

  // --- model_manager_update.cc: for who updates weights. These block; never called on a thread of
  // the manager's, nor on one that answers requests. ---

  // While it lives no load of the model begins, and none was running when it was taken.
  class Turn {
   public:
    ~Turn();
    Turn(const Turn&) = delete;

   private:
    friend class ModelManager;
    Turn(ModelManager& manager, std::shared_ptr<LoadOperation> operation)
        : manager_(manager), operation_(std::move(operation)) {}

    ModelManager& manager_;
    const std::shared_ptr<LoadOperation> operation_;
  };
  // Aborted when an unload overtook it.
  absl::StatusOr<std::unique_ptr<Turn>> TakeTurn(const std::string& model);
  // The active version, and how it was loaded (without weights). Errors as in Find.
  struct Active {
    VersionHandle version;
    std::shared_ptr<const LoadJob> job;
  };
  absl::StatusOr<Active> FindActive(absl::string_view model) const;
  // On a loader: in the background while models serve.
  void InBackground(absl::FunctionRef<void()> work);
  absl::StatusOr<LoadedModel> LoadModel(LoadJob job) { return loader_->Load(std::move(job)); }
  // Makes a version of `model`, like the active one but for number and weights, and warms it up.
  // Nobody sees it yet.
  absl::StatusOr<VersionHandle> MakeVersion(const Active& like, int64_t number,
                                            std::unique_ptr<planner::PreparedModel> model,
                                            double load_seconds);
  // The flip: `next` becomes the active version, `old`, which was, leaves service. Aborted, and
  // nothing has changed, when it was not, or an unload came between.
  absl::Status Supersede(const Turn& turn, const VersionHandle& old, const VersionHandle& next);
  // `version` gets this share of the requests that name no version; null: nobody does.
  void SetCanary(const std::string& model, VersionHandle version, double share);

 private:
  struct Version {
    VersionState state = VersionState::kUnknown;
    std::string reason;
    VersionHandle handle;    // set in kReady only
    VersionContent content;  // of the handle
    bool listed = false;     // in the repository, or selected though it is not
    int64_t resident = 0;    // which of the residents `handle` is or, in kUnloading, was
    int64_t ticket = 0;      // of the load that may publish here; 0: none
    std::shared_ptr<const LoadJob>
        job;                    // that the handle came from, or the one it was updated from
    int64_t superseded_by = 0;  // in kUnavailable: the update that took its place
  };
  struct Model {
    std::string directory;  // empty: no repository has it
    std::string refused;    // why no version could be looked at; empty: fine
    std::map<int64_t, Version> versions;
    int64_t active = 0;  // what updates led to; 0: nothing says so
    VersionHandle canary;
    double canary_share = 0;
    mutable double canary_due = 0;  // above 1 the next request is the canary's
    std::shared_ptr<ModelLatency> latency = std::make_shared<ModelLatency>();
  };
  using OperationPtr = std::shared_ptr<LoadOperation>;
  struct Loading {  // one version on its way
    OperationPtr operation;
    int64_t version = 0;
    int64_t ticket = 0;
    int64_t began_nanos = 0;
    std::string directory;  // of the model; empty: files in memory
    VersionContent content;
    bool leads = false, activates = false;  // see FoundVersion
    std::shared_ptr<const LoadJob> job;
    std::shared_ptr<ModelLatency> latency;
  };
  // Deletes the last handle's version, on a loader.
  struct Retirement {
    ModelManager* manager;
    int64_t resident;
    void operator()(ServedVersion* last) const {
      manager->control_.Schedule(
          [manager = manager, last, resident = resident] { manager->Retire(last, resident); });
    }
  };

  // --- model_manager_load.cc, in the order in which a load goes through them. C: on the control
  // thread, L: on a loader. ---
  void Enqueue(OperationPtr operation);
  void BeginNext(const std::string& name);                                     // C
  void Inspected(const OperationPtr& operation, Inspection found);             // C
  void LoadVersion(Loading loading, LoadJob job);                              // L
  void MakeInstances(Loading loading, absl::StatusOr<LoadedModel> loaded);     // C
  absl::StatusOr<VersionHandle> MakeResident(ServedVersion::Options options);  // C
  void WarmUpVersion(Loading loading, VersionHandle version);                  // L
  void Publish(const Loading& loading, absl::StatusOr<VersionHandle> result);  // C
  void VersionDone(const OperationPtr& operation);                             // C
  void Finish(const OperationPtr& operation);                                  // C
  void Retire(ServedVersion* last, int64_t resident);                          // C
  void OnControl(absl::FunctionRef<void()> work);
  // A model that its repository no longer has: unloaded, and then out of the index.
  void Remove(const std::string& name);

  // Takes over what the repository holds; the versions to load, which have a ticket then.
  std::vector<Loading> TakeOverLocked(const OperationPtr& operation, const Inspection& found)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void RefuseLocked(const std::string& name, Model& model, const absl::Status& why);
  static void Move(Version& version, VersionState to, std::string reason);
  // Moves a version that is ready or loading out of service.
  static VersionHandle UnloadVersionLocked(Version& version);
  // The version that took the place of `old` and of what it had superseded.
  static void PassOn(Model& model, int64_t old, int64_t next);
  // Drops versions, and the model, that are neither in a repository nor in use.
  void ForgetLocked(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<VersionHandle> ActiveLocked(absl::string_view name, const Model& model,
                                             bool or_canary) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AnyReadyLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Scan(std::vector<std::string>& to_load) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndStartLoad();
  std::unique_ptr<RepositoryWatch> MakeWatch();

  const Options options_;
  const std::unique_ptr<ModelLoader> loader_;
  mutable std::mutex mutex_;
  std::condition_variable idle_;  // no load and no resident is left
  std::map<std::string, Model, std::less<>> models_ ABSL_GUARDED_BY(mutex_);
  LoadLines lines_ ABSL_GUARDED_BY(mutex_);
  int64_t serial_ ABSL_GUARDED_BY(mutex_) = 0;   // of tickets and residents
  int residents_ ABSL_GUARDED_BY(mutex_) = 0;    // versions between load and end of their tear-down
  int start_loads_ ABSL_GUARDED_BY(mutex_) = 0;  // that Start began and that have not ended
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  LoadsByCode loads_by_code_ ABSL_GUARDED_BY(mutex_) = {};
  std::unique_ptr<RepositoryWatch> watch_;  // null: nobody looks for changes
  WorkerPool control_;
  WorkerPool loaders_;
};

}  // namespace espalier::runtime
