#include "engine/updates/version_store.h"

#include <algorithm>
#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "engine/formats/names.h"
#include "engine/updates/stored_file.h"
#include "engine/updates/version_graph.h"

namespace espalier::updates {
namespace {

constexpr size_t kMaxFolderNameBytes = 255;  // NAME_MAX

absl::Status CheckModelName(const std::string& model) {
  if (auto status = formats::CheckName("the model", model); !status.ok()) return status;
  if (model.size() > kMaxFolderNameBytes || model == "." || model == ".." ||
      model.find('/') != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("a model named ", formats::Quoted(model),
                     " has no place in the state directory: expected at most ", kMaxFolderNameBytes,
                     " bytes without a slash"));
  }
  return absl::OkStatus();
}

absl::Status CheckNumber(int64_t number) {
  if (number > 0 && number <= kMaxVersionNumber) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("version ", number, ", expected 1 to ", kMaxVersionNumber));
}

bool IsUnfinished(const FolderEntry& entry) {
  return entry.name.find(std::string(kTemporaryMark)) != std::string::npos;
}

// What serves, not what may serve.
bool Decides(AuditAction action) {
  return action == AuditAction::kActivated || action == AuditAction::kConfirmed ||
         action == AuditAction::kRolledBack || action == AuditAction::kQuarantined;
}

std::string EndText(const Probation& probation) {
  if (probation.until_micros == 0) return "on probation until it is confirmed";
  return absl::StrCat(
      "on probation until ",
      absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::FromUnixMicros(probation.until_micros),
                       absl::UTCTimeZone()));
}

}  // namespace

VersionStore::VersionStore(std::string folder, StoreOptions options)
    : folder_(std::move(folder)), options_(std::move(options)), files_(*options_.files) {}

VersionStore::~VersionStore() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  compaction_wanted_.notify_all();
  if (compactor_.joinable()) compactor_.join();
}

absl::StatusOr<std::unique_ptr<VersionStore>> VersionStore::Open(const std::string& state_dir,
                                                                 const std::string& model,
                                                                 const BaseVersion& base,
                                                                 StoreOptions options) {
  if (auto status = CheckModelName(model); !status.ok()) return status;
  if (auto status = CheckNumber(base.number); !status.ok()) return status;
  std::unique_ptr<VersionStore> store(
      new VersionStore(absl::StrCat(state_dir, "/models/", model), std::move(options)));
  if (auto status = store->MakeFolders(state_dir); !status.ok()) return status;
  if (auto status = store->Load(model, base); !status.ok()) return status;
  if (store->options_.compact_in_background)
    store->compactor_ = std::thread([raw = store.get()] { raw->CompactInBackground(); });
  return store;
}

absl::Status VersionStore::MakeFolders(const std::string& state_dir) {
  for (const std::string& path : {state_dir + "/models", folder_, folder_ + "/journals",
                                  folder_ + "/anchors", folder_ + "/deltas", Incoming()}) {
    if (auto status = EnsureFolder(files_, path); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status VersionStore::Load(const std::string& model, const BaseVersion& base) {
  const std::lock_guard lock(mutex_);
  auto state = ReadStoreState(files_, StatePath());
  const bool empty = absl::IsNotFound(state.status());
  if (!state.ok() && !empty) return state.status();
  if (empty) {
    state_.model = model;
    state_.active = base.number;
    state_.activations = 1;
    state_.Add({.number = base.number,
                .weights = base.weights,
                .state = UpdateState::kLive,
                .repository = true,
                .activation = 1,
                .seconds = Now()});
  } else {
    state_ = *std::move(state);
  }
  if (state_.model != model) {
    return Damaged(StatePath(), absl::StrCat("it is of model ", formats::Quoted(state_.model)));
  }
  if (auto status = OpenAudit(); !status.ok()) return status;
  if (empty) {
    if (auto status = CheckNeverUsed(base); !status.ok()) return status;
    if (auto status = Commit(state_, Event(AuditAction::kBase, state_, base.number)); !status.ok())
      return status;
  }
  if (auto status = CheckFiles(base.number); !status.ok()) return status;
  if (auto status = AdmitBase(base); !status.ok()) return status;
  if (auto status = AfterRestart(); !status.ok()) return status;
  return DeleteOrphans();
}

// Without a state a store is new, and what lies in it goes. But where versions were kept a state was there.
absl::Status VersionStore::CheckNeverUsed(const BaseVersion& base) const {
  bool used = audit_->last_sequence() > 0;
  for (const char* folder : {"/journals", "/anchors", "/deltas"}) {
    const auto entries = files_.List(folder_ + folder);
    if (!entries.ok()) return entries.status();
    for (const FolderEntry& entry : *entries) used |= !IsUnfinished(entry);
  }
  if (!used) return absl::OkStatus();
  return Damaged(StatePath(),
                 absl::StrCat("it is missing, but versions were kept beside it: bring it "
                              "back, or move ",
                              folder_, " away to begin anew with version ", base.number,
                              " of the repository"));
}

absl::Status VersionStore::OpenAudit() {
  auto audit = AuditLog::Open(files_, folder_ + "/audit", options_.max_audit_bytes);
  if (!audit.ok()) return audit.status();
  audit_ = std::make_unique<AuditLog>(*std::move(audit));
  const int64_t last = audit_->last_sequence();
  auto& pending = state_.pending;
  const int64_t expected = (pending.empty() ? state_.next_audit : pending.front().sequence) - 1;
  if (!pending.empty() && pending.front().sequence <= last) unsure_audit_ = last;
  state_.next_audit = std::max(state_.next_audit, last + 1);
  if (last < expected) {
    AuditRecord lost = Event(AuditAction::kLost, state_, state_.active,
                             absl::StrCat("records ", last + 1, " to ", expected, " were lost"));
    lost.sequence = expected;
    pending.insert(pending.begin(), std::move(lost));
  }
  FlushAudit();
  return absl::OkStatus();
}

absl::Status VersionStore::AdmitBase(const BaseVersion& base) {
  StoreState next = state_;
  if (VersionRecord* known = next.Find(base.number)) {
    if (known->weights != base.weights) {
      return absl::FailedPreconditionError(absl::StrCat(
          "version ", base.number, " has the digest ", ShortHex(known->weights),
          "…, the repository's has ", ShortHex(base.weights),
          "…: a version number names one set of bytes for ever; give it another number"));
    }
    if (known->repository) return absl::OkStatus();
    known->repository = true;
  } else {
    if (base.number <= state_.used_up) {
      return absl::FailedPreconditionError(absl::StrCat("version numbers up to ", state_.used_up,
                                                        " are used up, the repository has ",
                                                        base.number, ": give it a higher number"));
    }
    next.Add({.number = base.number,
              .weights = base.weights,
              .state = UpdateState::kStaged,
              .repository = true,
              .seconds = Now()});
  }
  const AuditRecord event = Event(AuditAction::kBase, next, base.number);
  return Commit(std::move(next), event);
}

absl::Status VersionStore::AddBase(const BaseVersion& base) {
  if (auto status = CheckNumber(base.number); !status.ok()) return status;
  const std::lock_guard lock(mutex_);
  return AdmitBase(base);
}

// Canaries ended with the process; a version on probation has so many starts to prove itself.
absl::Status VersionStore::AfterRestart() {
  StoreState next = state_;
  for (VersionRecord& record : next.versions) {
    if (record.state == UpdateState::kCanary) record.state = UpdateState::kStaged;
  }
  if (!next.probation) {
    if (next == state_) return absl::OkStatus();
    const AuditRecord event = Event(AuditAction::kStaged, next, next.active, "canaries ended");
    return Commit(std::move(next), event);
  }
  const int64_t active = next.active;
  ++next.unconfirmed_starts;
  if (options_.max_unconfirmed_starts == 0 ||
      next.unconfirmed_starts <= options_.max_unconfirmed_starts) {
    const AuditRecord event =
        Event(AuditAction::kActivated, next, active,
              absl::StrCat("start ", next.unconfirmed_starts, " on probation"));
    return Commit(std::move(next), event);
  }
  const std::string reason =
      absl::StrCat("not confirmed after ", options_.max_unconfirmed_starts, " starts");
  const auto back = GiveUpActive(next, UpdateState::kQuarantined, 0, reason);
  if (!back.ok()) return absl::OkStatus();  // there is nothing to go back to
  const AuditRecord event = Event(AuditAction::kQuarantined, next, active, reason);
  return Commit(std::move(next), event);
}

absl::Status VersionStore::CheckFile(const std::string& path, uint64_t bytes) const {
  const auto file = files_.Open(path, OpenMode::kRead);
  if (!file.ok())
    return absl::IsNotFound(file.status()) ? Damaged(path, "it is missing") : file.status();
  const auto size = (*file)->Size();
  if (!size.ok()) return size.status();
  if (*size == bytes) return absl::OkStatus();
  return Damaged(path, absl::StrCat("it has ", *size, " bytes, expected ", bytes));
}

// The active version needs its files; what other versions have lost is let go of, and they with it.
absl::Status VersionStore::CheckFiles(int64_t base) {
  StoreState next = state_;
  absl::Status damage;
  for (VersionRecord& record : next.versions) {
    if (record.delta_bytes > 0) {  // its move may have been interrupted; the state had decided
      if (auto status = MoveDelta(record); !status.ok()) return status;
    }
    for (const auto& [bytes, path] : {std::pair(&record.journal_bytes, JournalPath(record.number)),
                                      std::pair(&record.anchor_bytes, AnchorPath(record.number)),
                                      std::pair(&record.delta_bytes, DeltaPath(record.number))}) {
      if (*bytes == 0) continue;
      const auto status = CheckFile(path, *bytes);
      if (status.ok()) continue;
      if (!absl::IsDataLoss(status)) return status;
      if (damage.ok()) damage = status;
      *bytes = 0;
    }
  }
  if (damage.ok()) return absl::OkStatus();
  if (WayTo(next, next.active, IsRoot).empty()) {
    return absl::DataLossError(absl::StrCat(damage.message(), "; version ", next.active,
                                            " cannot be served without it: bring it back, or move ",
                                            folder_, " away to begin anew with version ", base,
                                            " of the repository"));
  }
  ForgetUnreachable(next);
  lost_files_ = absl::StrReplaceAll(damage.message(), {{folder_ + "/", ""}});
  const AuditRecord event = Event(AuditAction::kLost, next, next.active, lost_files_);
  const auto status = Commit(next, event);
  // On a disk that is full it is found out again at the next start.
  if (absl::IsResourceExhausted(status)) state_ = std::move(next);
  return absl::IsResourceExhausted(status) ? absl::OkStatus() : status;
}

absl::Status VersionStore::DeleteOrphans() const {
  std::set<std::string> named = {StatePath(), folder_ + "/audit", folder_ + "/audit.old"};
  for (const VersionRecord& record : state_.versions) {
    if (record.journal_bytes > 0) named.insert(JournalPath(record.number));
    if (record.anchor_bytes > 0) named.insert(AnchorPath(record.number));
    if (record.delta_bytes > 0) named.insert(DeltaPath(record.number));
  }
  for (const std::string& folder :
       {folder_, folder_ + "/journals", folder_ + "/anchors", folder_ + "/deltas", Incoming()}) {
    const auto entries = files_.List(folder);
    if (!entries.ok()) return entries.status();
    for (const FolderEntry& entry : *entries) {
      const std::string path = absl::StrCat(folder, "/", entry.name);
      const bool unfinished = IsUnfinished(entry);
      const bool unnamed = folder != Incoming() && named.count(path) == 0;
      if (entry.folder || !(unfinished || unnamed)) continue;
      if (auto status = files_.Unlink(path); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

int64_t VersionStore::Now() const {
  return options_.now_seconds ? options_.now_seconds() : static_cast<int64_t>(std::time(nullptr));
}

std::string VersionStore::JournalPath(int64_t number) const {
  return NumberedPath(folder_ + "/journals", number, ".espj");
}
std::string VersionStore::AnchorPath(int64_t number) const {
  return NumberedPath(folder_ + "/anchors", number, ".espa");
}
std::string VersionStore::DeltaPath(int64_t number) const {
  return NumberedPath(folder_ + "/deltas", number, ".espd");
}

// --- one decision ----------------------------------------------------------------------------------

// After a write that failed half-way: makes the disk have state_ again, so that what is done next
// does not rest on a state that was told to have failed.
absl::Status VersionStore::Settle(bool decides) {
  if (!unsettled_) return absl::OkStatus();
  auto status = WriteState(state_, decides);
  if (status.ok()) unsettled_ = false;
  return status;
}

// What is being received can be sent again: on a disk that is full it gives way to a decision.
absl::Status VersionStore::WriteState(const StoreState& state, bool decides) const {
  auto status = WriteStoreState(files_, StatePath(), state);
  if (!absl::IsResourceExhausted(status) || !decides) return status;
  const auto entries = files_.List(Incoming());
  if (!entries.ok()) return entries.status();
  for (const FolderEntry& entry : *entries)
    (void)files_.Unlink(absl::StrCat(Incoming(), "/", entry.name));
  return WriteStoreState(files_, StatePath(), state);
}

absl::Status VersionStore::Commit(StoreState next, AuditRecord event) {
  const bool decides = Decides(event.action);
  if (auto status = Settle(decides); !status.ok()) return status;
  FlushAudit();
  if (state_.pending.size() >= kMaxPendingAudit) {
    return absl::UnavailableError(absl::StrCat(
        state_.pending.size(), " audit records could not be written to ", folder_, "/audit"));
  }
  event.sequence = state_.next_audit;
  next.next_audit = state_.next_audit + 1;
  next.pending = state_.pending;
  next.pending.push_back(std::move(event));
  if (auto status = WriteState(next, decides); !status.ok()) {
    unsettled_ = true;
    (void)Settle();
    return status;
  }
  state_ = std::move(next);
  FlushAudit();
  return absl::OkStatus();
}

// The records are in the state as well, so that a failure here loses none.
void VersionStore::FlushAudit() {
  if (unsure_audit_ > 0) {
    if (!audit_->WriteAnew().ok()) return;
    auto& pending = state_.pending;
    pending.erase(
        std::remove_if(pending.begin(), pending.end(),
                       [&](const AuditRecord& record) { return record.sequence <= unsure_audit_; }),
        pending.end());
    unsure_audit_ = 0;
  }
  if (audit_->Append(state_.pending).ok()) state_.pending.clear();
}

AuditRecord VersionStore::Event(AuditAction action, const StoreState& next, int64_t number,
                                absl::string_view reason) const {
  AuditRecord event;
  event.seconds = Now();
  event.action = action;
  event.number = number;
  event.before = state_.active_weights();
  event.after = next.active_weights();
  if (const VersionRecord* record = next.Find(number)) event.signers = record->signers;
  event.reason = std::string(reason.substr(0, kMaxReasonBytes));
  return event;
}

// Nothing about the versions changes; the record alone is added.
void VersionStore::LogRefusal(int64_t number, const absl::Status& status) {
  const std::lock_guard lock(mutex_);
  if (!Settle().ok() || state_.pending.size() >= kMaxPendingAudit) return;
  AuditRecord event = Event(AuditAction::kRefused, state_, number, status.message());
  event.signers.clear();
  event.sequence = state_.next_audit++;
  state_.pending.push_back(std::move(event));
  FlushAudit();
}

absl::StatusOr<VersionRecord*> VersionStore::Step(StoreState& state, int64_t number, UpdateState to,
                                                  absl::string_view reason) const {
  VersionRecord* record = state.Find(number);
  if (record == nullptr) {
    return absl::NotFoundError(absl::StrCat("version ", number, " of model ",
                                            formats::Quoted(state.model), " is not kept here"));
  }
  if (!MayBecome(record->state, to)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "version ", number, " is ", NameOf(record->state), " and cannot become ", NameOf(to)));
  }
  record->state = to;
  record->seconds = Now();
  record->reason = std::string(reason.substr(0, kMaxReasonBytes));
  return record;
}

absl::Status VersionStore::StepAndCommit(int64_t number, UpdateState to, AuditAction action,
                                         absl::string_view reason) {
  const std::lock_guard lock(mutex_);
  StoreState next = state_;
  if (const auto step = Step(next, number, to, reason); !step.ok()) return step.status();
  const AuditRecord event = Event(action, next, number, reason);
  return Commit(std::move(next), event);
}

absl::Status VersionStore::StartCanary(int64_t number) {
  return StepAndCommit(number, UpdateState::kCanary, AuditAction::kCanary);
}

absl::Status VersionStore::EndCanary(int64_t number) {
  return StepAndCommit(number, UpdateState::kStaged, AuditAction::kStaged);
}

absl::Status VersionStore::Refuse(int64_t number, absl::string_view reason) {
  return StepAndCommit(number, UpdateState::kRefused, AuditAction::kRefused, reason);
}

// Everything of an activation but the old active version's own step.
absl::Status VersionStore::MakeActive(StoreState& next, int64_t number) const {
  const VersionRecord* before = next.Find(number);
  if (before != nullptr && before->state == UpdateState::kSuperseded) {
    return absl::FailedPreconditionError(
        absl::StrCat("version ", number, " is SUPERSEDED: roll back to it"));
  }
  const bool first = before != nullptr && before->state != UpdateState::kRolledBack;
  const auto record = Step(next, number, UpdateState::kLive);
  if (!record.ok()) return record.status();
  if (first && !(*record)->repository && (*record)->sequence <= next.accepted_sequence) {
    return absl::FailedPreconditionError(
        absl::StrCat("version ", number, " has sequence ", (*record)->sequence, ", ",
                     next.accepted_sequence, " was active already"));
  }
  const auto way = WayTo(next, number, IsRoot);
  if (way.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("no way leads to the weights of version ", number));
  }
  (*record)->replaced = next.active;
  (*record)->activation = ++next.activations;
  next.accepted_sequence = std::max(next.accepted_sequence, (*record)->sequence);
  for (VersionRecord* below = next.Find((*record)->parent); below != nullptr;
       below = next.Find(below->parent)) {
    if (below->state == UpdateState::kQuarantined) {
      return absl::FailedPreconditionError(absl::StrCat(
          "version ", number, " was made from version ", below->number, ", which is QUARANTINED"));
    }
    if (below->state != UpdateState::kStaged && below->state != UpdateState::kCanary) break;
    below->state = UpdateState::kSuperseded;
  }
  next.active = number;
  next.unconfirmed_starts = 0;
  return absl::OkStatus();
}

absl::Status VersionStore::Activate(int64_t number, std::optional<Probation> probation) {
  const std::lock_guard lock(mutex_);
  if (number == state_.active) return absl::OkStatus();
  if (state_.probation) {
    return absl::FailedPreconditionError(absl::StrCat(
        "version ", state_.active, " is on probation: confirm it, or roll it back, first"));
  }
  StoreState next = state_;
  if (const auto old = Step(next, next.active, UpdateState::kSuperseded); !old.ok())
    return old.status();
  if (auto status = MakeActive(next, number); !status.ok()) return status;
  next.probation = std::move(probation);
  const AuditRecord event =
      Event(AuditAction::kActivated, next, number, next.probation ? EndText(*next.probation) : "");
  auto status = Commit(std::move(next), event);
  if (status.ok()) wanted_ = true;
  compaction_wanted_.notify_all();
  return status;
}

absl::Status VersionStore::Confirm(int64_t number) {
  const std::lock_guard lock(mutex_);
  if (number != state_.active) {
    return absl::FailedPreconditionError(
        absl::StrCat("version ", number, " is not active, version ", state_.active, " is"));
  }
  if (!state_.probation) return absl::OkStatus();
  StoreState next = state_;
  next.probation.reset();
  next.unconfirmed_starts = 0;
  const AuditRecord event = Event(AuditAction::kConfirmed, next, number);
  auto status = Commit(std::move(next), event);
  if (status.ok()) wanted_ = true;
  compaction_wanted_.notify_all();
  return status;
}

// The active version becomes `as`; `to`, or what it replaced, becomes active again.
absl::StatusOr<int64_t> VersionStore::GiveUpActive(StoreState& next, UpdateState as, int64_t to,
                                                   absl::string_view reason) const {
  const auto old = Step(next, next.active, as, reason);
  if (!old.ok()) return old.status();
  if (to == 0) to = (*old)->replaced;
  if (next.Find(to) == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("version ", next.active, " has no earlier one here to go back to"));
  }
  if (const UpdateState state = next.Find(to)->state;
      state != UpdateState::kSuperseded && state != UpdateState::kRolledBack) {
    return absl::FailedPreconditionError(absl::StrCat(
        "version ", to, " is ", NameOf(state), ": only one that served can be gone back to"));
  }
  if (WayTo(next, to, IsRoot).empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("no way leads to the weights of version ", to));
  }
  const auto record = Step(next, to, UpdateState::kLive);
  if (!record.ok()) return record.status();
  (*record)->activation = ++next.activations;
  next.active = to;
  next.probation.reset();
  next.unconfirmed_starts = 0;
  return to;
}

absl::StatusOr<int64_t> VersionStore::Rollback(absl::string_view reason, int64_t to) {
  const std::lock_guard lock(mutex_);
  const int64_t from = state_.active;
  StoreState next = state_;
  const auto back = GiveUpActive(next, UpdateState::kRolledBack, to, reason);
  if (!back.ok()) return back.status();
  const AuditRecord event = Event(AuditAction::kRolledBack, next, from, reason);
  if (auto status = Commit(std::move(next), event); !status.ok()) return status;
  return *back;
}

absl::Status VersionStore::Quarantine(int64_t number, absl::string_view reason) {
  {
    const std::lock_guard lock(mutex_);
    if (number == state_.active) {
      StoreState next = state_;
      const auto back = GiveUpActive(next, UpdateState::kQuarantined, 0, reason);
      if (!back.ok()) return back.status();
      const AuditRecord event = Event(AuditAction::kQuarantined, next, number, reason);
      return Commit(std::move(next), event);
    }
  }
  return StepAndCommit(number, UpdateState::kQuarantined, AuditAction::kQuarantined, reason);
}

StoreState VersionStore::List() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

absl::StatusOr<std::vector<AuditRecord>> VersionStore::Audit(size_t most) const {
  const std::lock_guard lock(mutex_);
  return audit_->Read(most);
}

}  // namespace espalier::updates
