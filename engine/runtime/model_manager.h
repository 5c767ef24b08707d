// model_manager.h — every model of the repositories: loads them on threads of its own, hands out
// handles to versions.
//
//   Start ──scan──▶ per model: read config, select versions
//                       ──▶ per version: load, plan, start instances ──▶ READY
//
// A load that fails leaves its reason in the index and nothing else behind; other models and
// versions keep serving. A version whose last handle is dropped (unloaded, and every request that
// held it answered) is torn down on a loader thread: neither a request nor a front end thread ever
// waits for that.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "engine/runtime/model_loader.h"
#include "engine/runtime/repository.h"
#include "engine/runtime/served_version.h"
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
    // Time for measuring kernels at start, shared by the models that are loaded then.
    int64_t measure_budget_millis = 3000;
    // Called once, when every load that Start began has ended, well or not; on a loader thread, or
    // in Start when there was nothing to load.
    std::function<void()> on_started;
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
  // listed; a model found in two of them is refused (its reason names both).
  absl::Status Start();

  // Whether every load that Start began has ended.
  bool started() const;

  // The version to answer from; "" means the active one, the highest that is ready. Errors:
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
  // Latency of every model that was ever loaded; series live as long as the server.
  std::vector<std::pair<std::string, std::shared_ptr<const ModelLatency>>> Latencies() const;
  int64_t failed_loads() const;

  // Reads the model's config and loads the versions that its policy selects and that are not in
  // memory. Returns at once; the outcome is in the index. NotFound for a model that is not in a
  // repository.
  absl::Status Load(absl::string_view model);
  // No new request finds the model; the memory goes when those that hold it are answered. Returns
  // at once.
  absl::Status Unload(absl::string_view model);

 private:
  struct Version {
    VersionState state = VersionState::kUnknown;
    std::string reason;
    VersionHandle handle;              // set in kReady only
    bool discard_when_loaded = false;  // unloaded while loading
  };
  struct Model {
    std::string directory;
    std::string refused;  // why no version may be loaded; empty: fine
    std::map<int64_t, Version> versions;
    std::shared_ptr<ModelLatency> latency = std::make_shared<ModelLatency>();
  };

  // On a loader thread.
  void LoadModel(const std::string& name, int64_t measure_budget_millis);
  void LoadVersion(LoadJob job);
  void Publish(const std::string& name, int64_t number,
               absl::StatusOr<std::unique_ptr<ServedVersion>> result);
  void Retire(ServedVersion* last);

  // Of the versions that `config` selects, those to load now; they are LOADING afterwards.
  std::vector<int64_t> SelectLocked(Model& model, const inference::ModelConfig& config)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void RefuseLocked(const std::string& name, Model& model, std::string reason);
  static void Move(Version& version, VersionState to, std::string reason);
  absl::StatusOr<VersionHandle> ActiveLocked(absl::string_view name, const Model& model) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // One LoadModel or LoadVersion less; the end of the last one that Start began ends the start.
  void EndWork();

  const Options options_;
  const std::unique_ptr<ModelLoader> loader_;
  mutable std::mutex mutex_;
  std::condition_variable idle_;  // working_ or resident_ fell to zero
  std::map<std::string, Model, std::less<>> models_ ABSL_GUARDED_BY(mutex_);
  int resident_ ABSL_GUARDED_BY(mutex_) =
      0;                                     // versions between load and the end of their tear-down
  int working_ ABSL_GUARDED_BY(mutex_) = 0;  // scheduled or running LoadModel and LoadVersion
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t failed_loads_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<WorkerPool> pool_;
};

}  // namespace espalier::runtime
