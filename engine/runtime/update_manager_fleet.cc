// Updates that several servers take together or not at all; see fleet_log.h.
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
using updates::FleetDecision;
using updates::FleetTransaction;

// How often the first participant is asked, and how rarely in the end.
constexpr absl::Duration kAsk = absl::Seconds(1), kAskAtMost = absl::Seconds(30);

}  // namespace

absl::Status UpdateManager::CheckNotPromised(const Opened& opened) const {
  const auto pending = opened.line->fleet().Pending();
  if (!pending) return absl::OkStatus();
  return FailedPreconditionError(StrCat("version ", pending->version, " of '", opened.line->model(),
                                        "' is promised to transaction ", pending->id, ", which is ",
                                        NameOf(pending->decision), " and not done"));
}

absl::Status UpdateManager::Prepare(const std::string& model, FleetTransaction transaction) {
  if (auto status = updates::CheckTerms(transaction.probation); !status.ok()) return status;
  auto opened = Open(model);
  if (!opened.ok()) return opened.status();
  if (const auto known = opened->line->fleet().Find(transaction.id); known.ok())
    return opened->line->fleet().Prepare(std::move(transaction), opened->line->NowSeconds());
  auto held = Hold(*opened);
  if (!held.ok()) return held.status();
  // To this transaction, by another call of the same, or to another one: it tells.
  if (opened->line->fleet().Pending())
    return opened->line->fleet().Prepare(std::move(transaction), opened->line->NowSeconds());
  if (auto status = CheckActivation(held->state, transaction.version); !status.ok()) return status;
  if (held->state.Find(transaction.version)->state != updates::UpdateState::kStaged) {
    return FailedPreconditionError(StrCat("version ", transaction.version, " is ",
                                          NameOf(held->state.Find(transaction.version)->state),
                                          ", expected STAGED"));
  }
  auto next = opened->line->MakeReady(*models_, held->active, transaction.version);
  if (!next.ok()) return next.status();
  // The servers of a fleet prove a version before they promise it: afterwards each would decide for
  // itself alone.
  ProbationOptions terms = transaction.probation;
  terms.golden_requests |= options_.probation.golden_requests;
  if (auto status = Try(*opened, *held, *next, terms); !status.ok()) return status;
  if (terms.has_canary()) {
    if (auto status = opened->store->EndCanary(transaction.version); !status.ok()) return status;
    opened->line->Announce();
  }
  return opened->line->fleet().Prepare(std::move(transaction), opened->line->NowSeconds());
}

absl::StatusOr<FleetTransaction> UpdateManager::Decide(const std::string& model,
                                                       const std::string& id,
                                                       FleetDecision decision) {
  auto opened = Open(model);
  if (!opened.ok()) return opened.status();
  if (decision == FleetDecision::kUndecided)
    return absl::InvalidArgumentError("a decision is to commit or to abort");
  auto decided = opened->line->fleet().Decide(id, decision, opened->line->NowSeconds());
  if (!decided.ok()) return decided;
  LogEvent(spdlog::level::info, "transaction decided",
           {{"model", model},
            {"transaction", id},
            {"version", decided->version},
            {"decision", NameOf(decided->decision)}});
  if (auto status = CarryOut(*opened, *decided); !status.ok()) {
    return absl::Status(status.code(),
                        StrCat("transaction ", id, " is decided, ", NameOf(decided->decision),
                               ", and not carried out yet: ", status.message()));
  }
  return opened->line->fleet().Find(id);
}

absl::Status UpdateManager::CarryOut(const Opened& opened, const FleetTransaction& transaction) {
  if (transaction.done || transaction.decision != FleetDecision::kCommit) return absl::OkStatus();
  auto held = Hold(opened);
  if (!held.ok()) return held.status();
  // It served, perhaps, and has failed since: what was decided is done all the same.
  const updates::StoreState& state = held->state;
  if (state.active != transaction.version && !state.IsQuarantined(transaction.version)) {
    auto next = opened.line->MakeReady(*models_, held->active, transaction.version);
    if (!next.ok()) return next.status();
    const auto status = MakeActive(opened, *held, *next, transaction.probation);
    if (!status.ok()) return status;
  }
  return opened.line->fleet().Done(transaction.id);
}

absl::StatusOr<FleetTransaction> UpdateManager::Transaction(const std::string& model,
                                                            const std::string& id) const {
  auto opened = Open(model);
  if (!opened.ok()) return opened.status();
  return opened->line->fleet().Find(id);
}

void UpdateManager::AskUntilStopped() {
  struct Asked {
    absl::Time next;
    absl::Duration pause;
  };
  std::map<std::string, Asked> asked;  // by transaction
  while (WaitFor(kAsk)) {
    std::map<std::string, Asked> pending_still;
    for (const LinePtr& line : Lines()) {
      auto opened = Open(line->model());
      if (!opened.ok()) continue;
      const auto pending = line->fleet().Pending();
      if (!pending) continue;
      Asked& at = pending_still[pending->id] = asked[pending->id];
      if (absl::Now() < at.next) continue;
      at.pause = std::min(std::max(2 * at.pause, kAsk), kAskAtMost);
      at.next = absl::Now() + at.pause;
      // Who decides need not ask: what nobody decided in time is over when it expires.
      if (pending->decides())
        at.next = std::min(
            at.next, std::max(absl::FromUnixSeconds(pending->expires_seconds), absl::Now() + kAsk));
      absl::Status status = line->SettleFleet();
      const auto settled = line->fleet().Pending();
      if (status.ok() && settled) status = CarryOut(*opened, *settled);
      if (!status.ok()) {
        LogEvent(
            spdlog::level::warn, "transaction not done",
            {{"model", line->model()}, {"transaction", pending->id}, {"reason", status.message()}});
      }
    }
    asked.swap(pending_still);
  }
}

}  // namespace espalier::runtime
