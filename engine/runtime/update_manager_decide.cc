// From a version that is ready to one that serves, and back.
#include <algorithm>
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

bool IsCanary(const updates::StoreState& state, int64_t version) {
  const updates::VersionRecord* record = state.Find(version);
  return record != nullptr && record->state == UpdateState::kCanary;
}

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
  if (!state.probation) return absl::OkStatus();
  return FailedPreconditionError(
      StrCat("version ", state.active, " is on probation: confirm it, or roll it back, first"));
}

absl::Status UpdateManager::Activate(const std::string& model, int64_t version,
                                     std::optional<ProbationOptions> probation) {
  const ProbationOptions& terms = probation ? *probation : options_.probation;
  if (auto status = updates::CheckTerms(terms); !status.ok()) return status;
  auto opened = Open(model);
  if (!opened.ok()) return opened.status();
  auto held = Hold(*opened);
  if (!held.ok()) return held.status();
  if (version == held->state.active) return absl::OkStatus();
  if (auto status = CheckNotPromised(*opened); !status.ok()) return status;
  if (auto status = CheckActivation(held->state, version); !status.ok()) return status;
  const bool served = held->state.Find(version)->activation != 0;
  if (served && probation && *probation != ProbationOptions()) {
    return absl::InvalidArgumentError(
        StrCat("version ", version,
               " served before: it serves again at once and is confirmed, without golden requests, "
               "canary or probation; activate it without these"));
  }
  auto next = opened->line->MakeReady(*models_, held->active, version);
  if (!next.ok()) return next.status();
  if (!served) {
    if (auto status = Try(*opened, *held, *next, terms); !status.ok()) return status;
  }
  return MakeActive(*opened, *held, *next, served ? ProbationOptions() : terms);
}

absl::Status UpdateManager::MakeActive(const Opened& opened, const Held& held,
                                       const VersionHandle& next, const ProbationOptions& terms) {
  const int64_t version = next->version();
  const auto probation =
      updates::BeginProbation(terms, ConductOf(*held.active.version), absl::Now());
  if (probation) {
    next->WatchOutputs(true);
    // Before the decision: it is judged as soon as the store has that.
    const std::lock_guard lock(mutex_);
    probations_[opened.line->model()] = {version, next, ConductOf(*next)};
  }
  const auto status = Flip(opened, held, next, [&]() -> absl::Status {
    if (held.state.Find(version)->state == UpdateState::kSuperseded)
      return opened.store->Rollback("an earlier version was activated again", version).status();
    return opened.store->Activate(version, probation);
  });
  if (status.ok()) opened.line->counts().Add([](UpdateStatistics& counts) { ++counts.activated; });
  return status;
}

absl::Status UpdateManager::Try(const Opened& opened, const Held& held, const VersionHandle& next,
                                const ProbationOptions& terms) {
  const int64_t version = next->version();
  absl::Status judged;
  if (terms.golden_requests) {
    models_->InBackground(
        [&] { judged = AskGoldenRequests(next, held.active.job->directory).status(); });
    if (!judged.ok() && !absl::IsFailedPrecondition(judged)) return judged;
  }
  if (judged.ok() && !terms.has_canary()) return absl::OkStatus();
  if (auto status = opened.store->StartCanary(version); !status.ok()) return status;
  opened.line->Announce();
  if (judged.ok()) judged = Canary(opened, held, next, terms);
  const bool undecided = IsCanary(opened.store->List(), version);
  if (judged.ok() && undecided) return absl::OkStatus();
  if (!undecided) {
    judged = absl::AbortedError("it was given up meanwhile");
  } else if (absl::IsFailedPrecondition(judged)) {
    if (auto status = opened.store->Quarantine(version, judged.message()); !status.ok())
      return status;
    opened.line->counts().Add([](UpdateStatistics& counts) { ++counts.quarantined; });
  } else if (auto status = opened.store->EndCanary(version); !status.ok()) {
    return status;
  }
  opened.line->Announce();
  LogEvent(spdlog::level::err, "version not activated",
           {{"model", opened.line->model()}, {"version", version}, {"reason", judged.message()}});
  return absl::Status(judged.code(),
                      StrCat("version ", version, " was not activated: ", judged.message()));
}

// FailedPrecondition: it has failed. Another error: it was not judged to the end.
absl::Status UpdateManager::Canary(const Opened& opened, const Held& held,
                                   const VersionHandle& next, const ProbationOptions& terms) {
  const std::string& model = opened.line->model();
  const Conduct before = ConductOf(*next);
  const absl::Time until = absl::Now() + terms.canary_duration;
  next->WatchOutputs(true);
  models_->SetCanary(model, next, terms.canary_share);
  absl::Status status;
  for (bool last = false; status.ok() && !last;) {
    if (!WaitFor(std::min(kTick, until - absl::Now())))
      status = absl::UnavailableError("the server is shutting down");
    last = absl::Now() >= until || !IsCanary(opened.store->List(), next->version());
    const std::string failure =
        Breach(terms, ConductOf(*held.active.version), ConductOf(*next).Since(before), last);
    if (!failure.empty()) status = FailedPreconditionError(failure);
    const auto active = models_->FindActive(model);
    if (!active.ok() || active->version != held.active.version)
      status = absl::AbortedError("the model was unloaded meanwhile");
  }
  models_->SetCanary(model, nullptr, 0);
  next->WatchOutputs(false);
  return status;
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
  if (held->state.active != version || !held->state.probation) return absl::OkStatus();
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
