#include "engine/runtime/update_manager.h"

#include <pthread.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/runtime/log.h"
#include "engine/runtime/repository.h"
#include "engine/runtime/thread_priority.h"
#include "engine/tensor/device.h"

namespace espalier::runtime {
namespace {

using absl::StrCat;
using updates::UpdateState;

}  // namespace

UpdateManager::Operation::Operation(const UpdateManager& manager) : manager_(manager) {
  const std::lock_guard lock(manager_.mutex_);
  if (manager_.stopping_) status_ = absl::UnavailableError("the server is shutting down");
  if (!manager_.stopping_) ++manager_.operations_;
}

UpdateManager::Operation::~Operation() {
  if (!status_.ok()) return;
  const std::lock_guard lock(manager_.mutex_);
  if (--manager_.operations_ == 0) manager_.changed_.notify_all();
}

absl::StatusOr<std::unique_ptr<UpdateManager>> UpdateManager::Create(Options options) {
  if (options.state_dir.empty())
    return absl::InvalidArgumentError("updates of weights need a state directory");
  if (options.trust) {
    if (auto status = updates::CheckPolicy(*options.trust); !status.ok()) return status;
  }
  if (auto status = updates::CheckTerms(options.probation); !status.ok()) return status;
  return std::unique_ptr<UpdateManager>(new UpdateManager(std::move(options)));
}

UpdateManager::~UpdateManager() { Stop(); }

void UpdateManager::Attach(ModelManager& models) {
  models_ = &models;
  judge_ = std::thread([this] { JudgeUntilStopped(); });
  pthread_setname_np(judge_.native_handle(), "probation");
  ask_ = std::thread([this] { AskUntilStopped(); });
  pthread_setname_np(ask_.native_handle(), "fleet");
  if (options_.poll_interval <= absl::ZeroDuration()) return;
  look_ = std::thread([this] { LookUntilStopped(); });
  pthread_setname_np(look_.native_handle(), "deltas");
}

void UpdateManager::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  events_.Stop();
  for (const LinePtr& line : Lines()) line->other_copy().Drop();  // ends waits for it
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return operations_ == 0; });
  }
  for (std::thread* thread : {&judge_, &look_, &ask_}) {
    if (thread->joinable()) thread->join();
  }
  for (const LinePtr& line : Lines()) line->other_copy().Drop();
}

bool UpdateManager::stopping() const {
  const std::lock_guard lock(mutex_);
  return stopping_;
}

absl::StatusOr<UpdateManager::Opened> UpdateManager::Open(absl::string_view model) const {
  auto operation = std::make_unique<Operation>(*this);
  if (!operation->status().ok()) return operation->status();
  auto line = Line(model);
  if (!line.ok()) return line.status();
  auto store = (*line)->Store();
  if (!store.ok()) return store.status();
  return Opened{std::move(operation), *std::move(line), *store};
}

absl::StatusOr<UpdateManager::LinePtr> UpdateManager::Line(absl::string_view model) const {
  const std::lock_guard lock(mutex_);
  const auto line = lines_.find(model);
  if (line != lines_.end()) return line->second;
  return absl::NotFoundError(StrCat("model '", Printable(model), "' is not served"));
}

std::vector<UpdateManager::LinePtr> UpdateManager::Lines() const {
  std::vector<LinePtr> lines;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, line] : lines_) lines.push_back(line);
  return lines;
}

// --- for ModelManager ------------------------------------------------------------------------------

void UpdateManager::Redirect(const std::string& model, const LoadRequest& request,
                             const std::map<int64_t, VersionContent>& known, Inspection& found) {
  if (found.directory.empty()) return;
  LinePtr line;
  {
    const std::lock_guard lock(mutex_);
    LinePtr& place = lines_[model];
    if (place == nullptr) {
      place = std::make_shared<UpdateLine>(
          model,
          UpdateLine::Options{.state_dir = options_.state_dir,
                              .max_delta_bytes = options_.max_delta_bytes,
                              .files = options_.files,
                              .ask_participant = options_.ask_participant},
          events_);
    }
    line = place;
  }
  line->Redirect(request, known, found);
}

void UpdateManager::BeforeLoad(const std::string& model) {
  if (auto line = Line(model); line.ok()) (*line)->other_copy().Drop();
}

absl::Status UpdateManager::BeforePublish(const std::string& model, int64_t version) {
  auto line = Line(model);
  if (!line.ok()) return line.status();
  auto store = (*line)->Store();
  if (!store.ok()) return store.status();
  if (const auto pending = (*line)->fleet().Pending(); pending) {
    return absl::FailedPreconditionError(
        StrCat("version ", pending->version, " is promised to transaction ", pending->id));
  }
  const absl::Status status = (*store)->Activate(version);
  (*line)->Announce();
  if (status.ok()) (*line)->counts().Add([](UpdateStatistics& counts) { ++counts.activated; });
  return status;
}

void UpdateManager::Unloaded(const std::string& model) {
  if (auto line = Line(model); line.ok()) (*line)->other_copy().Drop();
}

void UpdateManager::Retired(const ServedVersion* version,
                            std::unique_ptr<planner::PreparedModel> model) {
  for (const LinePtr& line : Lines()) {
    if (line->other_copy().Retired(version, model)) return;
  }
}

// --- receive, stage --------------------------------------------------------------------------------

updates::ReceivePolicy UpdateManager::Policy() const {
  updates::ReceivePolicy policy;
  policy.trust = options_.trust;
  policy.now_seconds = absl::ToUnixSeconds(absl::Now());
  policy.threads = AvailableCpus();
  policy.worker_scope = BeginBackgroundWork;
  return policy;
}

namespace {

// The version that came with this file and is past its checks; 0: none.
int64_t KnownVersion(const updates::StoreState& state, const updates::Digest& file) {
  for (const updates::VersionRecord& record : state.versions) {
    const bool past = record.state != UpdateState::kVerified &&
                      record.state != UpdateState::kRefused &&
                      record.state != UpdateState::kQuarantined;
    if (record.parent != 0 && record.delta == file && past) return record.number;
  }
  return 0;
}

}  // namespace

absl::StatusOr<uint64_t> UpdateManager::BeginReceive(const std::string& model,
                                                     const updates::Digest& file, uint64_t bytes) {
  auto opened = Open(model);
  if (!opened.ok()) return opened.status();
  if (KnownVersion(opened->store->List(), file) != 0) return bytes;  // nothing is missing
  auto offset = opened->store->BeginReceive(file, bytes);
  if (!offset.ok() && absl::IsResourceExhausted(offset.status()))
    opened->line->counts().AddRefused(offset.status());
  return offset;
}

absl::Status UpdateManager::Append(const std::string& model, const updates::Digest& file,
                                   uint64_t offset, absl::string_view bytes) {
  auto opened = Open(model);
  if (!opened.ok()) return opened.status();
  const absl::Status status = opened->store->Append(file, offset, bytes);
  if (status.ok()) {
    opened->line->counts().Add(
        [&](UpdateStatistics& counts) { counts.received_bytes += bytes.size(); });
  }
  return status;
}

absl::Status UpdateManager::Abandon(const std::string& model, const updates::Digest& file) {
  auto opened = Open(model);
  if (!opened.ok()) return opened.status();
  return opened->store->AbandonReceive(file);
}

absl::StatusOr<int64_t> UpdateManager::VerifyAndStage(const Opened& opened,
                                                      const updates::Digest& file) {
  updates::VersionStore& store = *opened.store;
  auto head = store.FinishReceive(file);
  // Whole since an earlier call, perhaps: Verify knows.
  if (!head.ok() && !absl::IsNotFound(head.status())) return head.status();
  absl::StatusOr<updates::VerifiedDelta> verified = updates::VerifiedDelta();
  absl::Status staged;
  updates::Manifest manifest;
  int64_t changes = 0;
  models_->InBackground([&] {
    verified = store.Verify(file, Policy());
    opened.line->Announce();
    if (!verified.ok()) return;
    manifest = verified->manifest;
    changes = verified->journal->entries();
    staged = store.Stage(*std::move(verified));
  });
  if (absl::IsAlreadyExists(verified.status()) && head.ok()) return head->target_version;
  if (!verified.ok()) return verified.status();
  if (!staged.ok()) return staged;
  LogEvent(spdlog::level::info, "update staged",
           {{"model", opened.line->model()},
            {"version", manifest.target_version},
            {"base", manifest.base_version},
            {"sequence", manifest.sequence},
            {"changes", changes}});
  return manifest.target_version;
}

absl::Status UpdateManager::MakeStagedReady(const Opened& opened, int64_t version) {
  const updates::StoreState state = opened.store->List();
  const updates::VersionRecord* record = state.Find(version);
  // On probation the copy of the version before stays where it may be needed at once.
  if (state.probation || record == nullptr || record->state != UpdateState::kStaged)
    return absl::OkStatus();
  auto held = Hold(opened);
  if (!held.ok()) return held.status();
  return opened.line->MakeReady(*models_, held->active, version).status();
}

absl::StatusOr<int64_t> UpdateManager::StageFile(const Opened& opened, const updates::Digest& file,
                                                 bool tell) {
  int64_t version = KnownVersion(opened.store->List(), file);
  if (version == 0) {
    auto staged = VerifyAndStage(opened, file);
    if (!staged.ok() && tell) {
      opened.line->counts().AddRefused(staged.status());
      LogEvent(spdlog::level::warn, "update refused",
               {{"model", opened.line->model()},
                {"delta", updates::ShortHex(file)},
                {"reason", staged.status().message()}});
    }
    if (!staged.ok()) return staged;
    version = *staged;
  }
  if (auto status = MakeStagedReady(opened, version); !status.ok()) {
    return absl::Status(status.code(), StrCat("version ", version,
                                              " is staged, but not ready: ", status.message()));
  }
  return version;
}

absl::StatusOr<int64_t> UpdateManager::Stage(const std::string& model,
                                             const updates::Digest& file) {
  auto opened = Open(model);
  if (!opened.ok()) return opened.status();
  const int64_t began = NowNanos();
  auto version = StageFile(*opened, file, true);
  opened->line->Announce();
  opened->line->counts().Add([&](UpdateStatistics& counts) {
    if (version.ok()) ++counts.staged;
    counts.stage_seconds += SecondsSince(began);
  });
  return version;
}

// --- look ------------------------------------------------------------------------------------------

absl::StatusOr<std::vector<ModelVersions>> UpdateManager::List(absl::string_view model) const {
  std::vector<LinePtr> lines;
  if (model.empty()) {
    lines = Lines();
  } else {
    auto line = Line(model);
    if (!line.ok()) return line.status();
    if (auto store = (*line)->Store(); !store.ok()) return store.status();
    lines.push_back(*std::move(line));
  }
  std::vector<ModelVersions> list;
  for (const LinePtr& line : lines) {
    auto store = line->Store();
    if (!store.ok()) continue;
    ModelVersions versions{.store = (*store)->List()};
    const auto active = models_->FindActive(line->model());
    versions.serving = active.ok() ? active->version->version() : 0;
    versions.shadow = line->other_copy().version();
    if (const VersionHandle ready = line->other_copy().Ready(); ready != nullptr) {
      const auto* record = versions.store.Find(ready->version());
      const bool waits = record != nullptr && (record->state == UpdateState::kStaged ||
                                               record->state == UpdateState::kCanary);
      versions.staged = waits ? ready->version() : 0;
    }
    list.push_back(std::move(versions));
  }
  return list;
}

absl::StatusOr<std::vector<updates::AuditRecord>> UpdateManager::Audit(const std::string& model,
                                                                       size_t most) const {
  auto line = Line(model);
  if (!line.ok()) return line.status();
  auto store = (*line)->Store();
  return store.ok() ? (*store)->Audit(most) : store.status();
}

absl::StatusOr<std::vector<updates::StoredDelta>> UpdateManager::DeltasFrom(
    const std::string& model, int64_t from) const {
  auto line = Line(model);
  if (!line.ok()) return line.status();
  auto store = (*line)->Store();
  if (!store.ok()) return store.status();
  return (*store)->DeltasBetween(from, (*store)->List().active);
}

absl::StatusOr<std::vector<VersionEvent>> UpdateManager::EventsAfter(int64_t serial,
                                                                     absl::string_view model,
                                                                     absl::Time until) const {
  return events_.After(serial, model, until);
}

std::vector<UpdateStatistics> UpdateManager::Statistics() const {
  std::vector<UpdateStatistics> all;
  for (const LinePtr& line : Lines()) {
    auto store = line->Store();
    if (!store.ok()) continue;
    const updates::StoreState state = (*store)->List();
    UpdateStatistics one = line->counts().Read();
    one.model = line->model();
    one.version = state.active;
    one.sequence = state.Find(state.active)->sequence;
    one.on_probation = state.probation.has_value();
    all.push_back(std::move(one));
  }
  return all;
}

}  // namespace espalier::runtime
