// The way of a load through ModelManager.
#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/runtime/log.h"
#include "engine/runtime/model_manager.h"
#include "engine/runtime/plan_parameters.h"
#include "engine/runtime/warm_up.h"

namespace espalier::runtime {
namespace {

using absl::StrCat;

void LogLoaded(const ServedVersion& version) {
  const planner::PreparedModel& model = version.model();
  LogEvent(spdlog::level::info, "model loaded",
           {{"model", version.name()},
            {"version", version.version()},
            {"layouts", LayoutSummary(model.plan())},
            {"sparsity", Sparsity(model.plan())},
            {"resident_weight_bytes", model.weight_bytes()},
            {"dense_weight_bytes", model.dense_weight_bytes()},
            {"arena_bytes", version.arena_bytes()},
            {"instances", version.instances()},
            {"max_batch_size", version.config().max_batch_size()},
            {"plan", model.plan().source},
            {"load_ms", version.load_seconds() * 1e3}});
}

void LogNotLoaded(const std::string& model, int64_t version, const absl::Status& why) {
  LogEvent(spdlog::level::err, "model not loaded",
           {{"model", model}, {"version", version}, {"reason", why.message()}});
}

absl::Status Unloaded() { return absl::AbortedError("unloaded while it was loading"); }

// What a client of a load is told.
absl::Status Told(const std::string& model, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), StrCat("failed to load '", model, "': ", status.message()));
}

}  // namespace

void ModelManager::Move(Version& version, VersionState to, std::string reason) {
  if (!IsTransition(version.state, to)) {
    LogEvent(spdlog::level::critical, "impossible transition of a model version",
             {{"from", NameOf(version.state)}, {"to", NameOf(to)}});
    std::abort();
  }
  version.state = to;
  version.reason = std::move(reason);
  version.superseded_by = 0;
}

VersionHandle ModelManager::UnloadVersionLocked(Version& version) {
  version.ticket = 0;
  if (version.state == VersionState::kLoading)
    Move(version, VersionState::kUnavailable, "unloaded while it was loading");
  if (version.state != VersionState::kReady) return nullptr;
  Move(version, VersionState::kUnloading, "unloading: requests that hold it are still answered");
  version.content = {};
  return std::move(version.handle);
}

void ModelManager::ForgetLocked(const std::string& name) {
  const auto place = models_.find(name);
  if (place == models_.end() || lines_.Busy(name)) return;
  Model& model = place->second;
  bool in_use = false;
  std::erase_if(model.versions, [&](const auto& entry) {
    const VersionState state = entry.second.state;
    const bool idle = state == VersionState::kUnknown || state == VersionState::kUnavailable;
    in_use = in_use || !idle;
    return idle && !entry.second.listed && entry.second.superseded_by == 0;
  });
  if (model.directory.empty() && !in_use) models_.erase(place);
}

bool ModelManager::AnyReadyLocked() const {
  for (const auto& [name, model] : models_) {
    for (const auto& [number, version] : model.versions) {
      if (version.state == VersionState::kReady) return true;
    }
  }
  return false;
}

void ModelManager::Enqueue(OperationPtr operation) {
  const std::string name = operation->model;
  absl::StatusOr<bool> begin = false;
  {
    const std::lock_guard lock(mutex_);
    begin = stopping_ ? absl::UnavailableError("server is shutting down")
                      : absl::StatusOr<bool>(lines_.Add(operation));
  }
  if (!begin.ok()) {
    for (Done& done : operation->done) done(Told(name, begin.status()));
  } else if (*begin) {
    control_.Schedule([this, name] { BeginNext(name); });
  }
}

void ModelManager::BeginNext(const std::string& name) {
  OperationPtr operation;
  std::map<int64_t, VersionContent> known;
  {
    const std::lock_guard lock(mutex_);
    operation = lines_.Next(name);
    if (operation == nullptr) {
      if (lines_.empty()) idle_.notify_all();
      return;
    }
    if (operation->turn != nullptr) return operation->turn->count_down();
    if (!operation->at_start && !AnyReadyLocked())
      operation->measure_budget_millis = options_.measure_budget_millis;
    if (const auto model = models_.find(name); model != models_.end()) {
      for (const auto& [number, version] : model->second.versions) {
        if (version.state == VersionState::kReady) known[number] = version.content;
      }
    }
  }
  loaders_.Schedule([this, operation, known = std::move(known)] {
    Inspection found =
        Inspect(*loader_, options_.repositories, operation->model, operation->request, known);
    if (options_.updates != nullptr)
      options_.updates->Redirect(operation->model, operation->request, known, found);
    control_.Schedule([this, operation, found = std::move(found)]() mutable {
      Inspected(operation, std::move(found));
    });
  });
}

void ModelManager::RefuseLocked(const std::string& name, Model& model, const absl::Status& why) {
  LogEvent(spdlog::level::err, "model refused", {{"model", name}, {"reason", why.message()}});
  model.refused = std::string(why.message());
  for (auto& [number, version] : model.versions) {
    if (version.state == VersionState::kUnknown)
      Move(version, VersionState::kUnavailable, model.refused);
    if (version.state == VersionState::kUnavailable) version.reason = model.refused;
    if (version.state == VersionState::kReady)
      version.reason = StrCat("still served, as a later load failed: ", why.message());
  }
}

std::vector<ModelManager::Loading> ModelManager::TakeOverLocked(const OperationPtr& operation,
                                                                const Inspection& found) {
  std::vector<Loading> to_load;
  const std::string& name = operation->model;
  if (found.directory.empty() && operation->request.files.empty() && !models_.contains(name)) {
    operation->failure = found.status;  // nothing of that name anywhere: leave no trace
    return to_load;
  }
  Model& model = models_[name];
  if (found.looked) model.directory = found.directory;
  if (!found.available.empty()) {
    for (auto& [number, version] : model.versions) version.listed = false;
  }
  for (const int64_t number : found.available) {
    Version& version = model.versions[number];
    version.listed = true;
    if (version.state == VersionState::kUnknown)
      version.reason = "not selected by the model's version_policy";
  }
  if (!found.status.ok()) {
    RefuseLocked(name, model, found.status);
    operation->failure = found.status;
    return to_load;
  }
  for (auto& [number, version] : model.versions) {
    // What was wrong with the model is no longer.
    if (!model.refused.empty() && version.reason == model.refused)
      version.reason = "not selected by the model's version_policy";
  }
  model.refused.clear();
  for (const auto& [number, by] : found.superseded) {
    Version& version = model.versions[number];
    if (version.state == VersionState::kUnknown || version.state == VersionState::kUnavailable) {
      version.reason = StrCat("superseded by version ", by);
      version.superseded_by = by;
    }
  }
  for (const auto& [number, selected] : found.selected) {
    operation->selected.insert(number);
    if (operation->overtaken_here.contains(number)) continue;
    Version& version = model.versions[number];
    version.listed = version.listed || !operation->request.version;
    if (version.state == VersionState::kReady && selected.status.ok() &&
        version.content.digest == selected.content.digest) {
      version.content = selected.content;  // touched or copied anew, perhaps
      version.reason.clear();
      if (selected.leads) model.active = number;
      continue;
    }
    if (version.state != VersionState::kReady) Move(version, VersionState::kLoading, "");
    version.ticket = ++serial_;
    to_load.push_back({.operation = operation,
                       .version = number,
                       .ticket = version.ticket,
                       .content = selected.content,
                       .leads = selected.leads,
                       .activates = selected.activates,
                       .latency = model.latency});
  }
  operation->loading = static_cast<int>(to_load.size());
  return to_load;
}

void ModelManager::Inspected(const OperationPtr& operation, Inspection found) {
  std::vector<Loading> to_load;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) operation->overtaken = true;
    if (!operation->overtaken) to_load = TakeOverLocked(operation, found);
  }
  if (to_load.empty()) return Finish(operation);
  for (Loading& loading : to_load) {
    FoundVersion& selected = found.selected[loading.version];
    if (!selected.status.ok()) {
      Publish(loading, selected.status);
      continue;
    }
    LoadJob job = {.model = operation->model,
                   .directory = found.directory,
                   .version = selected.source != 0 ? selected.source : loading.version,
                   .config = found.config,
                   .measure_budget_millis = operation->measure_budget_millis};
    if (const auto files = operation->request.files.find(loading.version);
        files != operation->request.files.end()) {
      job.files = files->second;
      job.directory = StrCat("files given for '", operation->model, "'");
    }
    loading.job = std::make_shared<LoadJob>(job);
    job.weights = std::move(selected.weights);
    loaders_.Schedule([this, loading = std::move(loading), job = std::move(job)]() mutable {
      LoadVersion(std::move(loading), std::move(job));
    });
  }
}

void ModelManager::LoadVersion(Loading loading, LoadJob job) {
  LogEvent(spdlog::level::info, "model loading",
           {{"model", job.model}, {"version", loading.version}});
  loading.began_nanos = NowNanos();
  if (options_.updates != nullptr) options_.updates->BeforeLoad(job.model);
  const int64_t source = job.version;
  if (job.files == nullptr) loading.directory = job.directory;
  const inference::ModelConfig config = job.config;
  absl::StatusOr<LoadedModel> loaded = loader_->Load(std::move(job));
  // What was written to meanwhile is served, but not known: the next load reads it again.
  if (!loading.directory.empty()) {
    const auto now = FingerprintOf(loading.directory, source, config);
    if (!now.ok() || *now != loading.content.fingerprint) loading.content = {};
  }
  if (loaded.ok()) SetPlanParameters(*loaded->model, loaded->config);
  control_.Schedule([this, loading = std::move(loading), loaded = std::move(loaded)]() mutable {
    MakeInstances(std::move(loading), std::move(loaded));
  });
}

void ModelManager::MakeInstances(Loading loading, absl::StatusOr<LoadedModel> loaded) {
  if (!loaded.ok()) return Publish(loading, loaded.status());
  auto version =
      MakeResident({.name = loading.operation->model,
                    .version = loading.version,
                    .config = std::move(loaded->config),
                    .model = std::move(loaded->model),
                    .labels = std::move(loaded->labels),
                    .latency = loading.latency,
                    .default_max_pending = options_.default_max_pending,
                    .overload_code = options_.overload_code,
                    .load_seconds = static_cast<double>(NowNanos() - loading.began_nanos) * 1e-9});
  if (!version.ok()) return Publish(loading, version.status());
  VersionHandle handle = *std::move(version);
  if (handle->config().model_warmup().empty() && !loading.activates)
    return Publish(loading, std::move(handle));
  loaders_.Schedule([this, loading = std::move(loading), handle = std::move(handle)]() mutable {
    WarmUpVersion(std::move(loading), std::move(handle));
  });
}

absl::StatusOr<VersionHandle> ModelManager::MakeResident(ServedVersion::Options options) {
  auto version = ServedVersion::Create(std::move(options));
  if (!version.ok()) return version.status();
  // From here on it is a resident, whether it gets to serve or not.
  const std::lock_guard lock(mutex_);
  ++residents_;
  return VersionHandle(version->release(), Retirement{this, ++serial_});
}

void ModelManager::WarmUpVersion(Loading loading, VersionHandle version) {
  absl::Status status =
      WarmUp(version, loading.directory.empty() ? "" : StrCat(loading.directory, "/warmup"));
  if (status.ok() && loading.activates && !loading.operation->overtaken)
    status = options_.updates->BeforePublish(version->name(), version->version());
  control_.Schedule(
      [this, status, loading = std::move(loading), version = std::move(version)]() mutable {
        if (status.ok()) {
          Publish(loading, std::move(version));
        } else {
          Publish(loading, status);
        }
      });
}

void ModelManager::Publish(const Loading& loading, absl::StatusOr<VersionHandle> result) {
  VersionHandle replaced;  // outside the lock
  absl::Status status = result.status();
  {
    const std::lock_guard lock(mutex_);
    const auto model = models_.find(loading.operation->model);
    Version* version = nullptr;
    if (model != models_.end()) {
      const auto place = model->second.versions.find(loading.version);
      if (place != model->second.versions.end() && place->second.ticket == loading.ticket)
        version = &place->second;
    }
    if (version == nullptr) {
      status = Unloaded();
    } else {
      version->ticket = 0;
      if (status.ok()) {
        if (version->state == VersionState::kLoading) Move(*version, VersionState::kReady, "");
        version->reason.clear();
        replaced = std::exchange(version->handle, *result);
        version->content = loading.content;
        version->resident = std::get_deleter<Retirement>(*result)->resident;
        version->job = loading.job;
        if (loading.leads) model->second.active = loading.version;
      } else if (version->state == VersionState::kReady) {
        version->reason =
            StrCat("still served, as its new content does not load: ", status.message());
      } else {
        Move(*version, VersionState::kUnavailable, std::string(status.message()));
      }
    }
  }
  if (status.ok()) LogLoaded(**result);
  if (!status.ok() && !absl::IsAborted(status))
    LogNotLoaded(loading.operation->model, loading.version, status);
  if (loading.operation->failure.ok() && !status.ok()) {
    loading.operation->failure =
        absl::Status(status.code(), StrCat("version ", loading.version, ": ", status.message()));
  }
  VersionDone(loading.operation);
}

void ModelManager::VersionDone(const OperationPtr& operation) {
  if (--operation->loading == 0) Finish(operation);
}

void ModelManager::Finish(const OperationPtr& operation) {
  std::vector<VersionHandle> dropped;  // outside the lock
  {
    const std::lock_guard lock(mutex_);
    if (operation->overtaken) operation->failure = Unloaded();
    ++loads_by_code_[static_cast<int>(operation->failure.code())];
    const auto model = models_.find(operation->model);
    // What the policy no longer selects goes when all that it does select is there.
    if (operation->failure.ok() && !operation->request.version && model != models_.end()) {
      for (auto& [number, version] : model->second.versions) {
        if (operation->selected.contains(number) || version.state != VersionState::kReady) continue;
        dropped.push_back(UnloadVersionLocked(version));
      }
    }
    lines_.End(operation->model);
    ForgetLocked(operation->model);
    if (lines_.empty()) idle_.notify_all();
  }
  for (Done& done : operation->done) done(Told(operation->model, operation->failure));
  BeginNext(operation->model);
}

void ModelManager::Retire(ServedVersion* last, int64_t resident) {
  loaders_.ScheduleFirst([this, last, resident] {
    const std::string name = last->name();
    const int64_t number = last->version();
    auto model = ServedVersion::TakeModel(std::unique_ptr<ServedVersion>(last));
    if (options_.updates != nullptr) {
      options_.updates->Retired(last, std::move(model));
    } else {
      model.reset();
    }
    LogEvent(spdlog::level::info, "model unloaded", {{"model", name}, {"version", number}});
    control_.Schedule([this, name, number, resident] {
      // No malloc_trim: what is large is a mapping of its own (buffer.h), and for the rest it would
      // hold the allocator's locks, which requests need, for up to 50 ms (50 MB in small pieces).
      const std::lock_guard lock(mutex_);
      if (const auto model = models_.find(name); model != models_.end()) {
        const auto version = model->second.versions.find(number);
        if (version != model->second.versions.end() && version->second.resident == resident &&
            version->second.state == VersionState::kUnloading) {
          Move(version->second, VersionState::kUnavailable, "unloaded");
        }
        ForgetLocked(name);
      }
      if (--residents_ == 0) idle_.notify_all();
    });
  });
}

}  // namespace espalier::runtime
