// From a version that is ready to one that serves, and back.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/runtime/golden_requests.h"
#include "engine/runtime/log.h"
#include "engine/runtime/update_manager.h"

namespace espalier::runtime {
namespace {

using absl::FailedPreconditionError;
using absl::StrCat;
using updates::UpdateState;

// How often a canary is judged.
constexpr absl::Duration kTick = absl::Milliseconds(50);

}  // namespace

absl::StatusOr<UpdateManager::Held> UpdateManager::Hold(const Opened& opened) const {
  const std::string& model = opened.line->model();
  auto turn = models_->TakeTurn(model);
  if (!turn.ok()) return turn.status();
  auto active = models_->FindActive(model);
  if (!active.ok()) return active.status();
  updates::StoreState state = opened.store->List();
  const int64_t serving = active->version->version();
  if (serving != state.active || active->job == nullptr || active->job->files != nullptr) {
    return FailedPreconditionError(
        StrCat("model '", model, "' serves version ", serving,
               " of a load that named its files or its version, its updates led to version ",
               state.active, ": load it as its repository has it"));
  }
  return Held{*std::move(turn), *std::move(active), std::move(state)};
}

absl::Status UpdateManager::Flip(const Opened& opened, const Held& held, const VersionHandle& next,
                                 absl::FunctionRef<absl::Status()> decide) {
  UpdateLine& line = *opened.line;
  const int64_t began = NowNanos();
  if (auto status = decide(); !status.ok()) return status;
  const int64_t decided = NowNanos();
  absl::Status flipped = models_->Supersede(*held.turn, held.active.version, next);
  line.counts().Add([&](UpdateStatistics& counts) {
    counts.commit_seconds += SecondsSince(began);
    counts.flip_seconds += SecondsSince(decided);
  });
  if (flipped.ok()) {
    line.other_copy().Keep(held.active.version);
    LogEvent(spdlog::level::info, "model updated",
             {{"model", line.model()},
              {"version", next->version()},
              {"before", held.active.version->version()}});
  } else if (auto back = opened.store->Rollback(flipped.message(), held.state.active); !back.ok()) {
    LogEvent(spdlog::level::err, "the version that was decided for is not served",
             {{"model", line.model()},
              {"version", next->version()},
              {"reason", flipped.message()},
              {"not_undone", back.status().message()}});
  }
  line.Announce();
  return flipped;
}

absl::Status UpdateManager::CheckActivation(const updates::StoreState& state,
                                            int64_t version) const {
  const updates::VersionRecord* record = state.Find(version);
  if (record == nullptr) {
    return absl::NotFoundError(
        StrCat("version ", version, " of model '", state.model, "' is not kept here"));
  }
  if (record->state != UpdateState::kSuperseded &&
      !updates::MayBecome(record->state, UpdateState::kLive)) {
    return FailedPreconditionError(StrCat("version ", version, " is ", NameOf(record->state),
                                          ", expected one that is STAGED or served before"));
  }
  if (state.confirmed) return absl::OkStatus();
  return FailedPreconditionError(
      StrCat("version ", state.active, " is on probation: confirm it, or roll it back, first"));
}

absl::Status UpdateManager::Activate(const std::string& model, int64_t version,
                                     std::optional<ProbationOptions> probation) {
  auto opened = Open(model);
  if (!opened.ok()) return opened.status();
  auto held = Hold(*opened);
  if (!held.ok()) return held.status();
  if (version == held->state.active) return absl::OkStatus();
  if (auto status = CheckNotPromised(*opened); !status.ok()) return status;
  if (auto status = CheckActivation(held->state, version); !status.ok()) return status;
  auto next = opened->line->MakeReady(*models_, held->active, version);
  if (!next.ok()) return next.status();
  const ProbationOptions& terms = probation ? *probation : options_.probation;
  const bool served = held->state.Find(version)->activation != 0;
  if (!served) {
    if (auto status = Try(*opened, *held, *next, terms); !status.ok()) return status;
  }
  const bool on_probation = !served && terms.duration > absl::ZeroDuration();
  const auto status = Flip(*opened, *held, *next, [&]() -> absl::Status {
    if (held->state.Find(version)->state == UpdateState::kSuperseded)
      return opened->store->Rollback("an earlier version was activated again", version).status();
    return opened->store->Activate(
        version, on_probation ? updates::Probation::kUntilConfirmed : updates::Probation::kNone);
  });
  if (!status.ok()) return status;
  opened->line->counts().Add([](UpdateStatistics& counts) { ++counts.activated; });
  if (on_probation) {
    const std::lock_guard lock(mutex_);
    probations_[model] = {.version = version,
                          .terms = terms,
                          .until = absl::Now() + terms.duration,
                          .served = *next,
                          .old = Conduct::Of(*held->active.version),
                          .before = Conduct::Of(**next)};
    changed_.notify_all();
  }
  return absl::OkStatus();
}

absl::Status UpdateManager::Try(const Opened& opened, const Held& held, const VersionHandle& next,
                                const ProbationOptions& terms) {
  const int64_t version = next->version();
  std::string failure;
  if (terms.golden_requests) {
    absl::StatusOr<int> asked = 0;
    models_->InBackground([&] { asked = AskGoldenRequests(next, held.active.job->directory); });
    if (!asked.ok() && !absl::IsFailedPrecondition(asked.status())) return asked.status();
    if (!asked.ok()) failure = std::string(asked.status().message());
  }
  const bool canary = terms.canary_share > 0 && terms.canary_duration > absl::ZeroDuration();
  if (failure.empty() && !canary) return absl::OkStatus();
  if (auto status = opened.store->StartCanary(version); !status.ok()) return status;
  opened.line->Announce();
  if (failure.empty()) failure = Canary(opened, held, next, terms);
  // Somebody else may have decided meanwhile.
  const auto* record = opened.store->List().Find(version);
  const bool undecided = record != nullptr && record->state == UpdateState::kCanary;
  if (failure.empty() && undecided) return absl::OkStatus();
  if (undecided && stopping()) {
    (void)opened.store->EndCanary(version);
  } else if (undecided) {
    if (auto status = opened.store->Quarantine(version, failure); !status.ok()) return status;
    opened.line->counts().Add([](UpdateStatistics& counts) { ++counts.quarantined; });
  }
  opened.line->Announce();
  LogEvent(spdlog::level::err, "version not activated",
           {{"model", opened.line->model()}, {"version", version}, {"reason", failure}});
  return FailedPreconditionError(StrCat(
      "version ", version, " was not activated: ", failure.empty() ? "it was given up" : failure));
}

// Why it has failed; empty: it has not.
std::string UpdateManager::Canary(const Opened& opened, const Held& held, const VersionHandle& next,
                                  const ProbationOptions& terms) {
  const Conduct before = Conduct::Of(*next);
  const absl::Time until = absl::Now() + terms.canary_duration;
  next->WatchOutputs();
  models_->SetCanary(opened.line->model(), next, terms.canary_share);
  std::string failure;
  while (failure.empty()) {
    const bool last = absl::Now() >= until;
    failure =
        Breach(terms, Conduct::Of(*held.active.version), Conduct::Of(*next).Since(before), last);
    const auto* record = opened.store->List().Find(next->version());
    if (last || record == nullptr || record->state != UpdateState::kCanary) break;
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, absl::ToChronoNanoseconds(kTick), [this] { return stopping_; });
    if (stopping_) failure = "the server is shutting down";
  }
  models_->SetCanary(opened.line->model(), nullptr, 0);
  return failure;
}

absl::StatusOr<int64_t> UpdateManager::Rollback(const std::string& model, absl::string_view reason,
                                                int64_t to) {
  auto opened = Open(model);
  if (!opened.ok()) return opened.status();
  auto held = Hold(*opened);
  if (!held.ok()) return held.status();
  if (auto status = CheckNotPromised(*opened); !status.ok()) return status;
  const updates::StoreState& state = held->state;
  if (to == state.active) return to;
  const bool named = to != 0;
  if (!named) to = state.Find(state.active)->replaced;
  const updates::VersionRecord* record = state.Find(to);
  if (record == nullptr && named)
    return absl::NotFoundError(StrCat("version ", to, " of model '", model, "' is not kept here"));
  if (record == nullptr) {
    return FailedPreconditionError(
        StrCat("version ", state.active, " has no earlier one here to go back to"));
  }
  if (record->state != UpdateState::kSuperseded && record->state != UpdateState::kRolledBack) {
    return FailedPreconditionError(StrCat("version ", to, " is ", NameOf(record->state),
                                          ": only one that served can be gone back to"));
  }
  auto next = opened->line->MakeReady(*models_, held->active, to);
  if (!next.ok()) return next.status();
  const auto status =
      Flip(*opened, *held, *next, [&] { return opened->store->Rollback(reason, to).status(); });
  if (!status.ok()) return status;
  opened->line->counts().Add([](UpdateStatistics& counts) { ++counts.rolled_back; });
  return to;
}

absl::Status UpdateManager::Revert(const Opened& opened, int64_t version,
                                   const std::string& reason) {
  auto held = Hold(opened);
  if (!held.ok()) return held.status();
  if (held->state.active != version || held->state.confirmed) return absl::OkStatus();
  const int64_t to = held->state.Find(version)->replaced;
  auto next = opened.line->MakeReady(*models_, held->active, to);
  if (!next.ok()) return next.status();
  LogEvent(
      spdlog::level::err, "version on probation failed, the one before serves again",
      {{"model", opened.line->model()}, {"version", version}, {"before", to}, {"reason", reason}});
  const auto status =
      Flip(opened, *held, *next, [&] { return opened.store->Quarantine(version, reason); });
  if (status.ok())
    opened.line->counts().Add([](UpdateStatistics& counts) { ++counts.quarantined; });
  return status;
}

absl::Status UpdateManager::Confirm(const std::string& model, int64_t version) {
  auto opened = Open(model);
  return opened.ok() ? opened->store->Confirm(version) : opened.status();
}

absl::Status UpdateManager::Refuse(const std::string& model, int64_t version,
                                   absl::string_view reason) {
  auto opened = Open(model);
  if (!opened.ok()) return opened.status();
  if (const auto pending = opened->line->fleet().Pending(); pending && pending->version == version)
    return CheckNotPromised(*opened);
  const absl::Status status = opened->store->Refuse(version, reason);
  opened->line->Announce();
  return status;
}

}  // namespace espalier::runtime
