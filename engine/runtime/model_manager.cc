#include "engine/runtime/model_manager.h"

#include <algorithm>
#include <cstdlib>
#include <set>

#include "absl/strings/str_cat.h"
#include "engine/runtime/log.h"
#include "engine/runtime/repository.h"

namespace espalier::runtime {
namespace {

using absl::StrCat;

// Less is not worth measuring with: one candidate takes a few milliseconds.
constexpr int64_t kMinMeasureBudgetMillis = 200;

std::string Named(absl::string_view model) {
  return StrCat("Request for unknown model: '", Printable(model), "'");
}

}  // namespace

ModelManager::ModelManager(Options options, std::unique_ptr<ModelLoader> loader)
    : options_(std::move(options)),
      loader_(std::move(loader)),
      control_(1, "control"),
      loaders_(std::max(options_.loader_threads, 1), "loader") {}

ModelManager::~ModelManager() {
  if (watch_ != nullptr) watch_->Stop();
  if (options_.updates != nullptr) options_.updates->Stop();
  std::vector<OperationPtr> dropped;
  std::vector<std::string> names;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped = lines_.TakeWaiting();
    for (const auto& [name, model] : models_) names.push_back(name);
  }
  for (const OperationPtr& operation : dropped) {
    for (Done& done : operation->done) done(absl::UnavailableError("server is shutting down"));
  }
  for (const std::string& name : names) (void)Unload(name);
  {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return lines_.empty() && residents_ == 0; });
  }
  loaders_.Stop();
  control_.Stop();
}

absl::Status ModelManager::Scan(std::vector<std::string>& to_load) {
  for (const std::string& repository : options_.repositories) {
    auto found = ScanRepository(repository);
    if (!found.ok()) return found.status();
    for (const RepositoryModel& entry : *found) {
      Model& model = models_[entry.name];
      model.directory = entry.directory;
      for (const int64_t number : entry.versions) {
        Version& version = model.versions[number];
        version.listed = true;
        version.reason = options_.load_at_start ? "not loaded: nobody asked for it" : "";
      }
    }
  }
  if (!options_.load_at_start) {
    for (const auto& [name, model] : models_) to_load.push_back(name);
    return absl::OkStatus();
  }
  const std::set<std::string> wanted(options_.load_at_start->begin(),
                                     options_.load_at_start->end());
  for (const std::string& name : wanted) {
    if (!models_.contains(name)) {
      return absl::NotFoundError(
          StrCat("no repository has the model '", Printable(name), "', which is to be loaded"));
    }
    to_load.push_back(name);
  }
  return absl::OkStatus();
}

std::unique_ptr<RepositoryWatch> ModelManager::MakeWatch() {
  // Its thread is one in the background, which hands over to the control thread.
  return std::make_unique<RepositoryWatch>(RepositoryWatch::Options{
      .repositories = options_.repositories,
      .interval = options_.poll_interval,
      .load =
          [this](const std::string& name) {
            control_.Schedule([this, name] {
              Load(name, {}, [this, name](const absl::Status& s) { watch_->Ended(name, s); });
            });
          },
      .remove =
          [this](const std::string& name) { control_.Schedule([this, name] { Remove(name); }); }});
}

absl::Status ModelManager::Start() {
  std::vector<std::string> to_load;
  if (options_.poll_interval > absl::ZeroDuration()) {
    watch_ = MakeWatch();
    watch_->Begin();  // before the loads, so that no change is between
  }
  {
    const std::lock_guard lock(mutex_);
    if (absl::Status status = Scan(to_load); !status.ok()) return status;
    start_loads_ = static_cast<int>(to_load.size()) + 1;  // one for Start itself
  }
  const int64_t budget = std::max(
      kMinMeasureBudgetMillis,
      options_.measure_budget_millis / std::max<int64_t>(1, static_cast<int64_t>(to_load.size())));
  for (const std::string& name : to_load) {
    auto operation = std::make_shared<LoadOperation>();
    operation->model = name;
    operation->at_start = true;
    operation->measure_budget_millis = budget;
    operation->done.push_back([this, name](const absl::Status& status) {
      if (watch_ != nullptr) watch_->Ended(name, status);
      EndStartLoad();
    });
    Enqueue(std::move(operation));
  }
  EndStartLoad();
  if (watch_ != nullptr) watch_->Run();
  return absl::OkStatus();
}

bool ModelManager::started() const {
  const std::lock_guard lock(mutex_);
  return started_;
}

void ModelManager::EndStartLoad() {
  {
    const std::lock_guard lock(mutex_);
    if (--start_loads_ > 0 || stopping_) return;
    started_ = true;
  }
  // What is loaded from now on is loaded beside requests.
  loaders_.EnterBackground();
  if (options_.on_started) options_.on_started();
}

void ModelManager::Load(const std::string& name, LoadRequest request, Done done) {
  if (!IsModelName(name)) {
    done(absl::InvalidArgumentError(
        StrCat("failed to load '", Printable(name),
               "': expected a model name of 1 to 255 printable characters without '/', '\\' and "
               "'\"' that does not begin with '.'")));
    return;
  }
  auto operation = std::make_shared<LoadOperation>();
  operation->model = name;
  operation->request = std::move(request);
  operation->done.push_back(std::move(done));
  Enqueue(std::move(operation));
}

absl::Status ModelManager::Unload(absl::string_view name, std::optional<int64_t> version) {
  std::vector<VersionHandle> dropped;  // outside the lock
  std::vector<OperationPtr> overtaken;
  {
    const std::lock_guard lock(mutex_);
    const auto found = models_.find(name);
    if (found == models_.end()) return absl::NotFoundError(StrCat(Named(name), " is not found"));
    auto& versions = found->second.versions;
    if (version && !versions.contains(*version)) {
      return absl::NotFoundError(StrCat(Named(name), " version ", *version, " is not found"));
    }
    overtaken = lines_.Overtake(name, version);
    for (auto& [number, entry] : versions) {
      if (!version || number == *version) dropped.push_back(UnloadVersionLocked(entry));
    }
    ForgetLocked(std::string(name));
    if (lines_.empty()) idle_.notify_all();
  }
  if (options_.updates != nullptr) options_.updates->Unloaded(std::string(name));
  for (const OperationPtr& operation : overtaken) {
    for (Done& done : operation->done) {
      done(absl::AbortedError(
          StrCat("failed to load '", operation->model, "': unloaded before it was loaded")));
    }
  }
  return absl::OkStatus();
}

void ModelManager::Remove(const std::string& name) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = models_.find(name);
    if (found == models_.end()) return;
    found->second.directory.clear();
  }
  (void)Unload(name);
}

absl::StatusOr<VersionHandle> ModelManager::ActiveLocked(absl::string_view name, const Model& model,
                                                         bool or_canary) const {
  if (const auto active = model.versions.find(model.active);
      active != model.versions.end() && active->second.state == VersionState::kReady) {
    if (model.canary == nullptr || !or_canary) return active->second.handle;
    model.canary_due += model.canary_share;
    if (model.canary_due < 1) return active->second.handle;
    model.canary_due -= 1;
    return model.canary;
  }
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
  if (version.empty()) return ActiveLocked(name, model->second, true);
  const auto found = model->second.versions.find(*number);
  if (found == model->second.versions.end()) {
    return absl::NotFoundError(StrCat(Named(name), " version ", *number, " is not found"));
  }
  if (found->second.state != VersionState::kReady) {
    const int64_t superseded_by = found->second.superseded_by;
    return absl::UnavailableError(
        StrCat(Named(name), " version ", *number, " is not at ready state: it is ",
               NameOf(found->second.state),
               superseded_by == 0 ? "" : StrCat(", superseded by version ", superseded_by)));
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

ModelManager::LoadsByCode ModelManager::loads_by_code() const {
  const std::lock_guard lock(mutex_);
  return loads_by_code_;
}

}  // namespace espalier::runtime
