#include "engine/runtime/model_manager.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "engine/runtime/log.h"
#include "engine/runtime/plan_parameters.h"

namespace espalier::runtime {
namespace {

using absl::StrCat;

// Less is not worth measuring with: one candidate takes a few milliseconds.
constexpr int64_t kMinMeasureBudgetMillis = 200;

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

std::string Named(absl::string_view model) {
  return StrCat("Request for unknown model: '", Printable(model), "'");
}

}  // namespace

ModelManager::ModelManager(Options options, std::unique_ptr<ModelLoader> loader)
    : options_(std::move(options)),
      loader_(std::move(loader)),
      pool_(std::make_unique<WorkerPool>(std::max(options_.loader_threads, 1))) {}

ModelManager::~ModelManager() {
  std::vector<std::string> names;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    for (const auto& [name, model] : models_) names.push_back(name);
  }
  for (const std::string& name : names) (void)Unload(name);
  {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return working_ == 0 && resident_ == 0; });
  }
  pool_.reset();
}

absl::Status ModelManager::Start() {
  std::vector<std::string> to_load;
  {
    const std::lock_guard lock(mutex_);
    for (const std::string& repository : options_.repositories) {
      auto found = ScanRepository(repository);
      if (!found.ok()) return found.status();
      for (const RepositoryModel& entry : *found) {
        auto [place, is_new] = models_.try_emplace(entry.name);
        Model& model = place->second;
        for (int64_t version : entry.versions) model.versions[version];
        if (is_new) {
          model.directory = entry.directory;
        } else {
          RefuseLocked(entry.name, model,
                       StrCat("the model is in two repositories: ", model.directory, " and ",
                              entry.directory));
        }
      }
    }
    for (const auto& [name, model] : models_) {
      if (model.refused.empty()) to_load.push_back(name);
    }
    working_ += static_cast<int>(to_load.size()) + 1;  // one for Start itself
  }
  const int64_t budget = std::max(
      kMinMeasureBudgetMillis,
      options_.measure_budget_millis / std::max<int64_t>(1, static_cast<int64_t>(to_load.size())));
  for (std::string& name : to_load) {
    pool_->Schedule([this, name = std::move(name), budget] { LoadModel(name, budget); });
  }
  EndWork();
  return absl::OkStatus();
}

bool ModelManager::started() const {
  const std::lock_guard lock(mutex_);
  return started_;
}

void ModelManager::EndWork() {
  {
    const std::lock_guard lock(mutex_);
    if (--working_ > 0) return;
    idle_.notify_all();
    if (started_ || stopping_) return;
    started_ = true;
  }
  if (options_.on_started) options_.on_started();
}

void ModelManager::Move(Version& version, VersionState to, std::string reason) {
  if (!IsTransition(version.state, to)) {
    LogEvent(spdlog::level::critical, "impossible transition of a model version",
             {{"from", NameOf(version.state)}, {"to", NameOf(to)}});
    std::abort();
  }
  version.state = to;
  version.reason = std::move(reason);
}

void ModelManager::RefuseLocked(const std::string& name, Model& model, std::string reason) {
  LogEvent(spdlog::level::err, "model refused", {{"model", name}, {"reason", reason}});
  for (auto& [number, version] : model.versions) {
    if (version.state == VersionState::kUnknown) Move(version, VersionState::kUnavailable, reason);
    if (version.state == VersionState::kUnavailable) version.reason = reason;
  }
  model.refused = std::move(reason);
}

std::vector<int64_t> ModelManager::SelectLocked(Model& model,
                                                const inference::ModelConfig& config) {
  std::vector<int64_t> available, to_load;
  for (auto& [number, version] : model.versions) {
    available.push_back(number);
    if (version.state == VersionState::kUnknown)
      version.reason = "not selected by the model's version_policy";
  }
  for (int64_t number : SelectVersions(config.version_policy(), available)) {
    const auto place = model.versions.find(number);
    if (place == model.versions.end()) {
      Move(model.versions[number], VersionState::kUnavailable,
           StrCat("selected by the model's version_policy, but there is no directory ",
                  model.directory, "/", number));
    } else if (IsTransition(place->second.state, VersionState::kLoading)) {
      Move(place->second, VersionState::kLoading, "");
      place->second.discard_when_loaded = false;
      to_load.push_back(number);
    }
  }
  return to_load;
}

void ModelManager::LoadModel(const std::string& name, int64_t measure_budget_millis) {
  std::string directory;
  {
    const std::lock_guard lock(mutex_);
    directory = models_.find(name)->second.directory;
  }
  auto config = loader_->ReadConfig(directory);
  auto versions = ListVersions(directory);
  std::vector<LoadJob> jobs;
  {
    const std::lock_guard lock(mutex_);
    Model& model = models_.find(name)->second;
    for (int64_t number : versions.ok() ? *versions : std::vector<int64_t>())
      model.versions[number];
    if (!config.ok()) {
      RefuseLocked(name, model, std::string(config.status().message()));
    } else if (!versions.ok()) {
      RefuseLocked(name, model, std::string(versions.status().message()));
    } else if (model.versions.empty()) {
      RefuseLocked(
          name, model,
          StrCat("no version in ", directory, "; expected a directory like ", directory, "/1"));
    } else if (!stopping_) {
      model.refused.clear();
      for (int64_t number : SelectLocked(model, *config)) {
        jobs.push_back({name, directory, number, *config, measure_budget_millis});
      }
    }
    working_ += static_cast<int>(jobs.size());
  }
  for (LoadJob& job : jobs) {
    pool_->Schedule([this, job = std::move(job)]() mutable { LoadVersion(std::move(job)); });
  }
  EndWork();
}

void ModelManager::LoadVersion(LoadJob job) {
  const std::string name = job.model;
  const int64_t number = job.version;
  std::shared_ptr<ModelLatency> latency;
  bool abandoned = false;
  {
    const std::lock_guard lock(mutex_);
    const Model& model = models_.find(name)->second;
    latency = model.latency;
    abandoned = stopping_ || model.versions.find(number)->second.discard_when_loaded;
  }
  absl::StatusOr<std::unique_ptr<ServedVersion>> result =
      absl::CancelledError("unloaded before it was loaded");
  if (!abandoned) {
    LogEvent(spdlog::level::info, "model loading", {{"model", name}, {"version", number}});
    const int64_t began = NowNanos();
    auto loaded = loader_->Load(std::move(job));
    if (loaded.ok()) SetPlanParameters(*loaded->model, loaded->config);
    result = !loaded.ok() ? loaded.status()
                          : ServedVersion::Create(
                                {name, number, std::move(loaded->config), std::move(loaded->model),
                                 std::move(loaded->labels), latency, options_.default_max_pending,
                                 static_cast<double>(NowNanos() - began) * 1e-9});
  }
  Publish(name, number, std::move(result));
  EndWork();
}

void ModelManager::Publish(const std::string& name, int64_t number,
                           absl::StatusOr<std::unique_ptr<ServedVersion>> result) {
  VersionHandle handle;
  {
    const std::lock_guard lock(mutex_);
    Version& version = models_.find(name)->second.versions.find(number)->second;
    if (!result.ok()) {
      Move(version, VersionState::kUnavailable, std::string(result.status().message()));
      if (!absl::IsCancelled(result.status())) ++failed_loads_;
    } else if (version.discard_when_loaded) {
      Move(version, VersionState::kUnavailable, "unloaded while it was loading");
    } else {
      ++resident_;
      handle = VersionHandle(result->release(), [this](ServedVersion* last) {
        pool_->ScheduleFirst([this, last] { Retire(last); });
      });
      Move(version, VersionState::kReady, "");
      version.handle = handle;
    }
  }
  if (handle != nullptr) LogLoaded(*handle);
  if (!result.ok() && !absl::IsCancelled(result.status())) {
    LogEvent(spdlog::level::err, "model not loaded",
             {{"model", name}, {"version", number}, {"reason", result.status().message()}});
  }
}

void ModelManager::Retire(ServedVersion* last) {
  const std::string name = last->name();
  const int64_t number = last->version();
  delete last;
  LogEvent(spdlog::level::info, "model unloaded", {{"model", name}, {"version", number}});
  const std::lock_guard lock(mutex_);
  Move(models_.find(name)->second.versions.find(number)->second, VersionState::kUnavailable,
       "unloaded");
  if (--resident_ == 0) idle_.notify_all();
}

absl::Status ModelManager::Load(absl::string_view name) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = models_.find(name);
    if (found == models_.end()) return absl::NotFoundError(StrCat(Named(name), " is not found"));
    ++working_;
  }
  pool_->Schedule(
      [this, name = std::string(name)] { LoadModel(name, options_.measure_budget_millis); });
  return absl::OkStatus();
}

absl::Status ModelManager::Unload(absl::string_view name) {
  std::vector<VersionHandle> dropped;  // outside the lock
  const std::lock_guard lock(mutex_);
  const auto found = models_.find(name);
  if (found == models_.end()) return absl::NotFoundError(StrCat(Named(name), " is not found"));
  for (auto& [number, version] : found->second.versions) {
    if (version.state == VersionState::kLoading) version.discard_when_loaded = true;
    if (version.state != VersionState::kReady) continue;
    Move(version, VersionState::kUnloading, "unloading: requests that hold it are still answered");
    dropped.push_back(std::move(version.handle));
  }
  return absl::OkStatus();
}

absl::StatusOr<VersionHandle> ModelManager::ActiveLocked(absl::string_view name,
                                                         const Model& model) const {
  for (auto place = model.versions.rbegin(); place != model.versions.rend(); ++place) {
    if (place->second.state == VersionState::kReady) return place->second.handle;
  }
  for (const auto& [number, version] : model.versions) {
    if (version.state == VersionState::kLoading ||
        (version.state == VersionState::kUnknown && !started_)) {
      return absl::UnavailableError(
          StrCat(Named(name), " is not at ready state: version ", number, " is loading"));
    }
  }
  return absl::NotFoundError(StrCat(Named(name), " has no available versions"));
}

absl::StatusOr<VersionHandle> ModelManager::Find(absl::string_view name,
                                                 absl::string_view version) const {
  const std::optional<int64_t> number = ParseVersion(version);
  if (!version.empty() && !number) {
    return absl::InvalidArgumentError(
        StrCat("failed to get model version from specified version string '", Printable(version),
               "': expected an integer above zero, or nothing for the active version"));
  }
  const std::lock_guard lock(mutex_);
  const auto model = models_.find(name);
  if (model == models_.end()) return absl::NotFoundError(StrCat(Named(name), " is not found"));
  if (version.empty()) return ActiveLocked(name, model->second);
  const auto found = model->second.versions.find(*number);
  if (found == model->second.versions.end()) {
    return absl::NotFoundError(StrCat(Named(name), " version ", *number, " is not found"));
  }
  if (found->second.state != VersionState::kReady) {
    return absl::UnavailableError(StrCat(Named(name), " version ", *number,
                                         " is not at ready state: it is ",
                                         NameOf(found->second.state)));
  }
  return found->second.handle;
}

std::vector<int64_t> ModelManager::ReadyVersions(absl::string_view name) const {
  std::vector<int64_t> ready;
  const std::lock_guard lock(mutex_);
  const auto model = models_.find(name);
  if (model == models_.end()) return ready;
  for (const auto& [number, version] : model->second.versions) {
    if (version.state == VersionState::kReady) ready.push_back(number);
  }
  return ready;
}

std::vector<VersionHandle> ModelManager::AllReady() const {
  std::vector<VersionHandle> ready;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, model] : models_) {
    for (const auto& [number, version] : model.versions) {
      if (version.state == VersionState::kReady) ready.push_back(version.handle);
    }
  }
  return ready;
}

absl::StatusOr<std::vector<VersionHandle>> ModelManager::Select(absl::string_view model,
                                                                absl::string_view version) const {
  std::vector<VersionHandle> selected;
  if (model.empty()) return AllReady();
  if (auto found = Find(model, version); !found.ok()) return found.status();
  for (VersionHandle& handle : AllReady()) {
    if (handle->name() != model) continue;
    if (version.empty() || absl::StrCat(handle->version()) == version)
      selected.push_back(std::move(handle));
  }
  return selected;
}

std::vector<ModelManager::IndexEntry> ModelManager::Index() const {
  std::vector<IndexEntry> index;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, model] : models_) {
    for (const auto& [number, version] : model.versions)
      index.push_back({name, number, version.state, version.reason});
    if (model.versions.empty())
      index.push_back({name, 0, VersionState::kUnavailable, model.refused});
  }
  return index;
}

std::vector<std::pair<std::string, std::shared_ptr<const ModelLatency>>> ModelManager::Latencies()
    const {
  std::vector<std::pair<std::string, std::shared_ptr<const ModelLatency>>> latencies;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, model] : models_) latencies.emplace_back(name, model.latency);
  return latencies;
}

int64_t ModelManager::failed_loads() const {
  const std::lock_guard lock(mutex_);
  return failed_loads_;
}

}  // namespace espalier::runtime
