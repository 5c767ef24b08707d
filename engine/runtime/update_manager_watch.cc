// What happens without being asked for: versions on probation are judged, deltas in folders taken up.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/runtime/log.h"
#include "engine/runtime/update_manager.h"
#include "engine/runtime/version_content.h"

namespace espalier::runtime {
namespace {

using updates::UpdateState;

constexpr absl::Duration kTick = absl::Milliseconds(50);
constexpr size_t kPieceBytes = 1 << 20;

bool FailsForGood(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsPermissionDenied(status) ||
         absl::IsUnimplemented(status) || absl::IsAlreadyExists(status);
}

}  // namespace

bool UpdateManager::WaitFor(absl::Duration duration) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, absl::ToChronoNanoseconds(duration), [this] { return stopping_; });
  return !stopping_;
}

void UpdateManager::JudgeUntilStopped() {
  while (WaitFor(kTick)) JudgeProbations();
}

void UpdateManager::LookUntilStopped() {
  while (WaitFor(options_.poll_interval)) {
    for (const LinePtr& line : Lines()) {
      if (auto opened = Open(line->model()); opened.ok())
        TakeDeltas(*opened, folders_[line->model()]);
    }
  }
}

void UpdateManager::JudgeProbations() {
  for (const LinePtr& line : Lines()) {
    auto opened = Open(line->model());
    if (!opened.ok()) continue;
    const updates::StoreState state = opened->store->List();
    if (state.probation) {
      Judge(*opened, state.active, *state.probation);
    } else {
      EndWatch(line->model(), state.active);
    }
  }
}

// The version was confirmed. One that is about to be activated is noted already, and stays so.
void UpdateManager::EndWatch(const std::string& model, int64_t active) {
  VersionHandle served;
  const std::lock_guard lock(mutex_);
  const auto place = probations_.find(model);
  if (place == probations_.end() || place->second.version != active) return;
  if (served = place->second.served.lock(); served != nullptr) served->WatchOutputs(false);
  probations_.erase(place);
}

Conduct UpdateManager::ConductOnProbation(const std::string& model, int64_t version) {
  OnProbation known;
  {
    const std::lock_guard lock(mutex_);
    known = probations_[model];
  }
  VersionHandle served = known.served.lock();
  if (known.version != version || served == nullptr) {
    // It was loaded again, perhaps by another process: what it does counts from its first request on.
    const auto active = models_->FindActive(model);
    if (!active.ok() || active->version->version() != version) return {};
    served = active->version;
    served->WatchOutputs(true);
    known = {.version = version, .served = served};
    const std::lock_guard lock(mutex_);
    probations_[model] = known;
  }
  return ConductOf(*served).Since(known.before);
}

void UpdateManager::Judge(const Opened& opened, int64_t version,
                          const updates::Probation& probation) {
  const bool last =
      probation.until_micros != 0 && absl::Now() >= absl::FromUnixMicros(probation.until_micros);
  const Conduct now = ConductOnProbation(opened.line->model(), version);
  std::string failure = Breach(probation.terms, probation.old, now, last);
  absl::Status status;
  if (!failure.empty()) {
    if (const auto transaction = opened.line->fleet().Committed(version)) {
      absl::StrAppend(&failure, "; transaction ", transaction->id, " took it to ",
                      transaction->participants.size(),
                      " servers, the others of which may serve it");
    }
    status = Revert(opened, version, failure);
  } else if (last) {
    status = opened.store->Confirm(version);
  }
  // It is tried again at the next tick.
  if (!status.ok()) {
    LogEvent(spdlog::level::debug, "probation not ended",
             {{"model", opened.line->model()}, {"reason", status.message()}});
  }
}

// What a delta that does not fit may fit after: another version is active, or confirmed.
int64_t UpdateManager::StateOf(const Opened& opened) {
  const updates::StoreState state = opened.store->List();
  return 2 * state.activations + (state.probation ? 0 : 1);
}

// --- deltas in the repository ----------------------------------------------------------------------

absl::Status UpdateManager::ReceiveFile(const std::string& model, const DeltaFolder::File& file) {
  auto offset = BeginReceive(model, file.digest, file.bytes);
  if (!offset.ok()) return offset.status();
  auto opened = formats::RegularFile::Open(file.path);
  if (!opened.ok()) return opened.status();
  const updates::FileSource source(*std::move(opened));
  std::string piece;
  for (uint64_t at = *offset; at < file.bytes; at += piece.size()) {
    piece.resize(static_cast<size_t>(std::min<uint64_t>(kPieceBytes, file.bytes - at)));
    if (auto status = source.ReadAt(at, piece.data(), piece.size()); !status.ok()) return status;
    if (auto status = Append(model, file.digest, at, piece); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status UpdateManager::TakeDelta(const Opened& opened, const DeltaFolder::File& file,
                                      bool first) {
  const std::string& model = opened.line->model();
  const updates::StoreState state = opened.store->List();
  const updates::VersionRecord* known = state.Find(file.target);
  const bool same = known != nullptr && known->weights == file.target_weights;
  // It served, or was given up: that it still lies there asks for nothing.
  if (same && known->state != UpdateState::kVerified && known->state != UpdateState::kStaged)
    return absl::OkStatus();
  absl::Status status = file.status;
  if (status.ok() && !(same && known->state == UpdateState::kStaged)) {
    status = ReceiveFile(model, file);
    if (status.ok()) status = StageFile(opened, file.digest, first).status();
    opened.line->Announce();
  } else if (!status.ok() && first) {
    opened.line->counts().AddRefused(status);
  }
  if (status.ok()) {
    opened.line->counts().Add([&](UpdateStatistics& counts) { counts.staged += same ? 0 : 1; });
    status = Activate(model, file.target);
  }
  if (!status.ok() && first) {
    LogEvent(spdlog::level::warn, "delta of the repository not taken up",
             {{"model", model}, {"file", file.path}, {"reason", status.message()}});
  }
  return status;
}

void UpdateManager::TakeDeltas(const Opened& opened, DeltaFolder& folder) {
  std::string path;
  {
    // Held no longer: one delta's update waits for the version that another one's replaced.
    const auto active = models_->FindActive(opened.line->model());
    if (!active.ok() || active->job == nullptr || active->job->files != nullptr) return;
    path = absl::StrCat(active->job->directory, "/", kDeltaFolder);
  }
  absl::StatusOr<std::vector<DeltaFolder::File>> files = std::vector<DeltaFolder::File>();
  models_->InBackground([&] { files = folder.Look(path, StateOf(opened)); });
  if (!files.ok()) {
    LogEvent(spdlog::level::warn, "deltas of the repository cannot be looked at",
             {{"model", opened.line->model()}, {"reason", files.status().message()}});
    return;
  }
  for (const DeltaFolder::File& file : *files) {
    if (stopping()) return;
    const absl::Status status = TakeDelta(opened, file, folder.Note(file.name));
    if (status.ok() || FailsForGood(status)) {
      folder.Settle(file.name);
    } else if (absl::IsFailedPrecondition(status)) {
      folder.Wait(file.name, StateOf(opened));
    }
  }
}

}  // namespace espalier::runtime
