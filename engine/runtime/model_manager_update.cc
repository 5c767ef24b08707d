// ModelManager as those see it who update the weights of its models.
#include <iterator>
#include <latch>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/runtime/log.h"
#include "engine/runtime/model_manager.h"
#include "engine/runtime/plan_parameters.h"
#include "engine/runtime/warm_up.h"

namespace espalier::runtime {
namespace {

using absl::StrCat;

// Numbers that are remembered, so that a request for one of them is told what took its place.
constexpr int kMaxSuperseded = 64;

// Returns when it is done.
void RunIn(WorkerPool& pool, absl::FunctionRef<void()> work) {
  std::latch done{1};
  pool.Schedule([&] {
    work();
    done.count_down();
  });
  done.wait();
}

}  // namespace

void ModelManager::OnControl(absl::FunctionRef<void()> work) { RunIn(control_, work); }

void ModelManager::InBackground(absl::FunctionRef<void()> work) { RunIn(loaders_, work); }

ModelManager::Turn::~Turn() {
  {
    const std::lock_guard lock(manager_.mutex_);
    manager_.lines_.End(operation_->model);
    manager_.ForgetLocked(operation_->model);
    if (manager_.lines_.empty()) manager_.idle_.notify_all();
  }
  manager_.control_.Schedule(
      [&manager = manager_, name = operation_->model] { manager.BeginNext(name); });
}

absl::StatusOr<std::unique_ptr<ModelManager::Turn>> ModelManager::TakeTurn(
    const std::string& model) {
  auto operation = std::make_shared<LoadOperation>();
  operation->model = model;
  operation->turn = std::make_shared<std::latch>(1);
  absl::Status refused;
  operation->done.push_back([&, turn = operation->turn](const absl::Status& status) {
    refused = absl::Status(status.code(), StrCat("no update of '", model, "': ", status.message()));
    turn->count_down();
  });
  Enqueue(operation);
  operation->turn->wait();
  if (!refused.ok()) return refused;
  return std::unique_ptr<Turn>(new Turn(*this, std::move(operation)));
}

absl::StatusOr<ModelManager::Active> ModelManager::FindActive(absl::string_view name) const {
  const std::lock_guard lock(mutex_);
  const auto model = models_.find(name);
  if (model == models_.end())
    return absl::NotFoundError(
        StrCat("Request for unknown model: '", Printable(name), "' is not found"));
  auto active = ActiveLocked(name, model->second, /*or_canary=*/false);
  if (!active.ok()) return active.status();
  const int64_t number = (*active)->version();
  return Active{*std::move(active), model->second.versions.at(number).job};
}

absl::StatusOr<VersionHandle> ModelManager::MakeVersion(
    const Active& like, int64_t number, std::unique_ptr<planner::PreparedModel> model,
    double load_seconds) {
  inference::ModelConfig config = like.version->config();
  SetPlanParameters(*model, config);
  absl::StatusOr<VersionHandle> version;
  OnControl([&] {
    version = MakeResident({.name = like.version->name(),
                            .version = number,
                            .config = std::move(config),
                            .model = std::move(model),
                            .labels = like.version->labels(),
                            .latency = like.version->latency(),
                            .default_max_pending = options_.default_max_pending,
                            .overload_code = options_.overload_code,
                            .load_seconds = load_seconds});
  });
  if (!version.ok()) return version;
  absl::Status warm;
  InBackground([&] { warm = WarmUp(*version, StrCat(like.job->directory, "/warmup")); });
  if (!warm.ok()) return warm;
  return version;
}

void ModelManager::PassOn(Model& model, int64_t old, int64_t next) {
  int remembered = 0;
  for (auto place = model.versions.rbegin(); place != model.versions.rend(); ++place) {
    Version& version = place->second;
    if (place->first != old && version.superseded_by == 0) continue;
    version.superseded_by = ++remembered > kMaxSuperseded && !version.listed ? 0 : next;
    version.reason = StrCat("superseded by version ", next);
  }
}

absl::Status ModelManager::Supersede(const Turn& turn, const VersionHandle& old,
                                     const VersionHandle& next) {
  VersionHandle canary;  // outside the lock
  absl::Status status;
  OnControl([&] {
    const std::lock_guard lock(mutex_);
    const auto found = models_.find(turn.operation_->model);
    const bool overtaken = turn.operation_->overtaken || found == models_.end();
    const auto place = overtaken ? decltype(found->second.versions.find(0)){}
                                 : found->second.versions.find(old->version());
    if (overtaken || place == found->second.versions.end() || place->second.handle != old) {
      status = absl::AbortedError(StrCat("version ", old->version(), " of '",
                                         turn.operation_->model, "' was unloaded meanwhile"));
      return;
    }
    Model& model = found->second;
    Version& before = place->second;
    Version& after = model.versions[next->version()];
    if (after.state != VersionState::kReady) {
      Move(after, VersionState::kLoading, "");
      Move(after, VersionState::kReady, "");
      after.handle = next;
      after.resident = std::get_deleter<Retirement>(next)->resident;
      after.content = before.content;
      after.job = before.job;
      after.listed = true;
    }
    model.active = next->version();
    canary = std::move(model.canary);
    (void)UnloadVersionLocked(before);
    Move(before, VersionState::kUnavailable, "");
    PassOn(model, old->version(), next->version());
  });
  return status;
}

void ModelManager::SetCanary(const std::string& name, VersionHandle version, double share) {
  const std::lock_guard lock(mutex_);
  const auto model = models_.find(name);
  if (model == models_.end()) return;
  std::swap(model->second.canary, version);  // the one before goes outside the lock
  model->second.canary_share = share;
  model->second.canary_due = 0;
}

}  // namespace espalier::runtime
