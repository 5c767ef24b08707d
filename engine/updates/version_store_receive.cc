// From bytes to a staged version.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/formats/names.h"
#include "engine/updates/journal_file.h"
#include "engine/updates/refusal.h"
#include "engine/updates/version_graph.h"
#include "engine/updates/version_store.h"

namespace espalier::updates {
namespace {

// Whether the same bytes would fail again, whatever happens here meanwhile.
bool FailsForGood(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsPermissionDenied(status) ||
         absl::IsUnimplemented(status);
}

absl::Status CheckBaseVersion(const StoreState& state, const Manifest& manifest) {
  using enum UpdateState;
  const VersionRecord* base = state.Find(manifest.base_version);
  if (base == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("the delta is made for version ", manifest.base_version,
                     ", which is not kept here; version ", state.active, " is active"));
  }
  if (auto status = CheckBase(manifest, base->weights); !status.ok()) return status;
  if (base->state != kStaged && base->state != kCanary && base->state != kLive &&
      base->state != kSuperseded) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the delta is made for version ", base->number, ", which is ", NameOf(base->state)));
  }
  if (manifest.sequence <= base->sequence) {
    return absl::FailedPreconditionError(absl::StrCat("the delta has sequence ", manifest.sequence,
                                                      ", its base has ", base->sequence,
                                                      " already"));
  }
  return absl::OkStatus();
}

absl::Status CheckSequence(const StoreState& state, const Manifest& manifest) {
  if (manifest.sequence <= state.accepted_sequence) {
    return absl::FailedPreconditionError(
        absl::StrCat("the delta has sequence ", manifest.sequence, ", ", state.accepted_sequence,
                     " was active already: it is old, or was sent before"));
  }
  for (const VersionRecord& record : state.versions) {
    if (record.parent == 0 || record.sequence != manifest.sequence ||
        record.number == manifest.target_version)
      continue;
    return absl::FailedPreconditionError(absl::StrCat("the delta has sequence ", manifest.sequence,
                                                      ", which version ", record.number, " has"));
  }
  return absl::OkStatus();
}

}  // namespace

// --- bytes -----------------------------------------------------------------------------------------

// Deletes the one that waited longest when there are as many as are allowed. One that nobody began
// in this process has waited longest of all.
absl::Status VersionStore::MakeRoomForPartial(const Digest& coming) {
  const auto entries = files_.List(Incoming());
  if (!entries.ok()) return entries.status();
  std::vector<std::pair<int64_t, std::string>> parts;
  for (const FolderEntry& entry : *entries) {
    absl::string_view name = entry.name;
    if (!absl::ConsumeSuffix(&name, ".part") && !absl::ConsumeSuffix(&name, ".whole")) continue;
    if (name == Hex(coming)) return absl::OkStatus();  // it has its room
    int64_t touched = 0;
    for (const auto& [digest, receiving] : receiving_) {
      if (Hex(digest) == name) touched = receiving.touched;
    }
    parts.emplace_back(touched, std::string(name));
  }
  std::sort(parts.begin(), parts.end());
  const size_t allowed = static_cast<size_t>(std::max(options_.max_partial_deltas, 1));
  for (size_t i = 0; i + allowed < parts.size() + 1; ++i) {
    for (auto it = receiving_.begin(); it != receiving_.end();)
      it = Hex(it->first) == parts[i].second ? receiving_.erase(it) : std::next(it);
    for (auto it = received_.begin(); it != received_.end();)
      it = Hex(*it) == parts[i].second ? received_.erase(it) : std::next(it);
    for (const absl::string_view extension : {".part", ".sums", ".whole"}) {
      auto status =
          UnlinkIfThere(files_, absl::StrCat(Incoming(), "/", parts[i].second, extension));
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> VersionStore::BeginReceive(const Digest& file, uint64_t bytes) {
  if (bytes == 0 || bytes > options_.max_delta_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a delta of ", bytes, " bytes, expected 1 to ", options_.max_delta_bytes));
  }
  const std::lock_guard lock(receiving_mutex_);
  if (const auto known = receiving_.find(file); known != receiving_.end()) {
    if (known->second.partial->bytes() == bytes) {
      known->second.touched = ++touches_;
      return known->second.partial->offset();
    }
    receiving_.erase(known);
  }
  received_.erase(file);
  if (auto status = MakeRoomForPartial(file); !status.ok()) return status;
  auto partial = PartialDelta::Open(files_, Incoming(), file, bytes, options_.piece_bytes);
  if (!partial.ok()) return partial.status();
  const uint64_t offset = partial->offset();
  receiving_[file] = {std::make_unique<PartialDelta>(*std::move(partial)), ++touches_};
  return offset;
}

absl::Status VersionStore::Append(const Digest& file, uint64_t offset, absl::string_view bytes) {
  const std::lock_guard lock(receiving_mutex_);
  const auto known = receiving_.find(file);
  if (known == receiving_.end()) {
    return absl::NotFoundError(
        absl::StrCat("no delta ", ShortHex(file), "… is being received: begin again"));
  }
  known->second.touched = ++touches_;
  auto status = known->second.partial->Append(offset, bytes);
  // The disk failed: begin anew with what it has.
  if (!status.ok() && !absl::IsInvalidArgument(status)) receiving_.erase(known);
  return status;
}

absl::StatusOr<Manifest> VersionStore::FinishReceive(const Digest& file) {
  {
    const std::lock_guard lock(receiving_mutex_);
    const auto known = receiving_.find(file);
    if (known == receiving_.end()) {
      return absl::NotFoundError(
          absl::StrCat("no delta ", ShortHex(file), "… is being received: begin again"));
    }
    if (known->second.partial->offset() != known->second.partial->bytes()) {
      return absl::InvalidArgumentError(absl::StrCat("got ", known->second.partial->offset(),
                                                     " bytes, ", known->second.partial->bytes(),
                                                     " were announced"));
    }
    const auto status = known->second.partial->Finish();
    receiving_.erase(known);
    if (!status.ok()) return status;
    received_.insert(file);
  }
  const auto delta = OpenDelta(file);
  if (delta.ok()) return delta->manifest();
  LogRefusal(0, delta.status());
  if (FailsForGood(delta.status())) (void)AbandonReceive(file);
  return delta.status();
}

absl::Status VersionStore::AbandonReceive(const Digest& file) {
  const std::lock_guard lock(receiving_mutex_);
  receiving_.erase(file);
  received_.erase(file);
  return PartialDelta::Delete(files_, Incoming(), file);
}

// --- checks ----------------------------------------------------------------------------------------

absl::StatusOr<DeltaFile> VersionStore::OpenDelta(const Digest& file) const {
  const std::shared_lock kept(files_kept_);
  std::string path = PartialDelta::WholePathOf(Incoming(), file);
  {
    const std::lock_guard lock(mutex_);
    for (const VersionRecord& record : state_.versions) {
      if (record.delta_bytes == 0 || record.delta != file) continue;
      if (auto status = MoveDelta(record); !status.ok()) return status;
      path = DeltaPath(record.number);
    }
  }
  auto source = OpenedSource::Open(files_, path);
  if (!source.ok()) return source.status();
  return DeltaFile::Open(*std::move(source));
}

absl::Status VersionStore::CheckTargetNumber(const Manifest& manifest) const {
  const int64_t number = manifest.target_version;
  if (number < 1 || number > kMaxVersionNumber) {
    return absl::InvalidArgumentError(
        absl::StrCat("target version ", number, ", expected 1 to ", kMaxVersionNumber));
  }
  const auto& bad = state_.quarantined;
  bool quarantined = std::find(bad.begin(), bad.end(), manifest.target_weights) != bad.end();
  for (const VersionRecord& record : state_.versions) {
    quarantined |=
        record.state == UpdateState::kQuarantined && record.weights == manifest.target_weights;
  }
  const VersionRecord* known = state_.Find(number);
  if (known != nullptr && known->weights != manifest.target_weights) {
    return absl::FailedPreconditionError(absl::StrCat(
        "version ", number, " has the digest ", ShortHex(known->weights), "…, the delta's has ",
        ShortHex(manifest.target_weights), "…: a version number names one set of bytes for ever"));
  }
  if (quarantined) {
    return Because(
        "quarantined",
        absl::FailedPreconditionError(absl::StrCat(
            "the delta leads to weights ", ShortHex(manifest.target_weights),
            "…, which are QUARANTINED",
            known != nullptr && !known->reason.empty() ? absl::StrCat(": ", known->reason) : "")));
  }
  if (known == nullptr && number <= state_.used_up) {
    return absl::FailedPreconditionError(absl::StrCat("version numbers up to ", state_.used_up,
                                                      " are used up, the delta has ", number,
                                                      ": publish it with a higher number"));
  }
  if (known != nullptr && known->state != UpdateState::kVerified &&
      known->state != UpdateState::kRefused) {
    return absl::AlreadyExistsError(
        absl::StrCat("version ", number, " is here already, ", NameOf(known->state)));
  }
  return absl::OkStatus();
}

absl::Status VersionStore::CheckNumbers(const Manifest& manifest) const {
  auto status = Because("known_number", CheckTargetNumber(manifest));
  if (status.ok()) status = Because("old_sequence", CheckSequence(state_, manifest));
  return status.ok() ? Because("other_base", CheckBaseVersion(state_, manifest)) : status;
}

// What spends least on a stranger first; the weights are read last.
absl::StatusOr<VerifiedDelta> VersionStore::Check(const DeltaFile& delta, ReceivePolicy policy,
                                                  const TensorReader* base) {
  VerifiedDelta verified;
  verified.manifest = delta.manifest();
  const Manifest& manifest = verified.manifest;
  if (policy.trust) {
    auto signers = delta.CheckSigned(*policy.trust);
    if (!signers.ok()) return signers.status();
    verified.signers = *std::move(signers);
    policy.trust.reset();  // once is enough: it reads the body
  }
  if (auto status = Because("expired", CheckFresh(manifest, policy.now_seconds)); !status.ok())
    return status;
  Digest base_weights;
  std::shared_ptr<const BlockDigests> known;
  {
    const std::lock_guard lock(mutex_);
    policy.model = state_.model;
    if (auto status = Because("other_model", CheckModel(manifest, policy.model)); !status.ok())
      return status;
    if (auto status = CheckNumbers(manifest); !status.ok()) return status;
    base_weights = state_.Find(manifest.base_version)->weights;
    if (const auto found = blocks_.find(base_weights); found != blocks_.end())
      known = found->second;
  }
  std::shared_ptr<const TensorReader> stored;
  if (base == nullptr) {
    auto weights = Weights(manifest.base_version);
    if (!weights.ok()) return weights.status();
    stored = *std::move(weights);
    base = stored.get();
  }
  auto blocks =
      known != nullptr ? std::make_shared<BlockDigests>(*known) : std::make_shared<BlockDigests>();
  // Beside its place: whatever it will be, Stage may find another one there meanwhile.
  auto journal =
      std::make_unique<JournalWriter>(files_, JournalPath(manifest.target_version),
                                      JournalEnds{manifest.base_version, manifest.target_version,
                                                  base_weights, manifest.target_weights});
  auto status = Receive(delta, *base, base_weights, policy, *blocks, *journal);
  if (!status.ok()) return status;
  {
    const std::lock_guard lock(mutex_);
    blocks_.clear();
    if (known != nullptr) blocks_[base_weights] = std::move(known);
    blocks_[manifest.target_weights] = std::move(blocks);
  }
  verified.journal = std::move(journal);
  return verified;
}

absl::StatusOr<VerifiedDelta> VersionStore::Verify(const Digest& file, ReceivePolicy policy,
                                                   const TensorReader* base) {
  bool known = false;
  {
    const std::lock_guard lock(mutex_);
    for (const VersionRecord& record : state_.versions)
      known |= record.delta == file && record.state == UpdateState::kVerified;
  }
  if (!known) {
    const std::lock_guard lock(receiving_mutex_);
    if (received_.count(file) == 0) {
      return absl::NotFoundError(
          absl::StrCat("no delta ", ShortHex(file), "… was received as a whole"));
    }
  }
  const auto delta = OpenDelta(file);
  if (!delta.ok()) return delta.status();
  auto verified = Check(*delta, std::move(policy), base);
  auto status = verified.status();
  if (status.ok()) status = Admit(file, delta->size(), *verified);
  if (status.ok()) return verified;
  if (absl::IsAlreadyExists(status) || FailsForGood(status)) (void)AbandonReceive(file);
  if (!absl::IsAlreadyExists(status)) LogRefusal(delta->manifest().target_version, status);
  return status;
}

// The version is VERIFIED once the state says so; the file is moved after that, and again by the
// next one who needs it if that was interrupted.
absl::Status VersionStore::Admit(const Digest& file, uint64_t bytes,
                                 const VerifiedDelta& verified) {
  const Manifest& manifest = verified.manifest;
  const std::shared_lock kept(files_kept_);
  const std::lock_guard lock(mutex_);
  if (auto status = CheckNumbers(manifest); !status.ok()) return status;
  StoreState next = state_;
  const auto waiting =
      std::count_if(next.versions.begin(), next.versions.end(), [](const VersionRecord& record) {
        return record.state == UpdateState::kVerified || record.state == UpdateState::kStaged ||
               record.state == UpdateState::kCanary;
      });
  VersionRecord* record = next.Find(manifest.target_version);
  if (record != nullptr && record->state == UpdateState::kVerified && record->delta == file)
    return MoveDelta(*record);
  if (waiting >= options_.max_waiting_versions || next.versions.size() >= kMaxStoredVersions) {
    return absl::ResourceExhaustedError(absl::StrCat(
        waiting, " versions wait to be activated, the limit is ", options_.max_waiting_versions));
  }
  if (record == nullptr) {
    record = &next.Add({.number = manifest.target_version, .state = UpdateState::kReceiving});
  }
  if (record->state != UpdateState::kVerified) {
    const auto step = Step(next, manifest.target_version, UpdateState::kVerified);
    if (!step.ok()) return step.status();
  }
  record->weights = manifest.target_weights;
  record->parent = manifest.base_version;
  record->sequence = manifest.sequence;
  record->delta = file;
  record->delta_bytes = bytes;
  record->journal_bytes = 0;
  record->signers = verified.signers;
  const VersionRecord moved = *record;
  const AuditRecord event = Event(AuditAction::kVerified, next, record->number);
  if (auto status = Commit(std::move(next), event); !status.ok()) return status;
  return MoveDelta(moved);
}

absl::Status VersionStore::MoveDelta(const VersionRecord& record) const {
  const std::string whole = PartialDelta::WholePathOf(Incoming(), record.delta);
  const auto there = files_.Exists(whole);
  if (!there.ok()) return there.status();
  if (!*there) return absl::OkStatus();
  if (auto status = files_.Rename(whole, DeltaPath(record.number)); !status.ok()) return status;
  if (auto status = files_.SyncFolder(folder_ + "/deltas"); !status.ok()) return status;
  return PartialDelta::Delete(files_, Incoming(), record.delta);
}

absl::Status VersionStore::Stage(VerifiedDelta verified) {
  const std::shared_lock kept(files_kept_);
  const int64_t number = verified.manifest.target_version;
  {
    const std::lock_guard lock(mutex_);
    StoreState trial = state_;
    const auto step = Step(trial, number, UpdateState::kStaged);
    if (!step.ok()) return step.status();
    const VersionRecord* base = state_.Find((*step)->parent);
    if (base == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat(
          "version ", number, " is made for ", (*step)->parent, ", which is not kept any more"));
    }
    if (verified.journal->ends() !=
        JournalEnds{base->number, number, base->weights, (*step)->weights}) {
      return absl::FailedPreconditionError(
          absl::StrCat("version ", number, " came with another delta meanwhile"));
    }
  }
  const auto bytes = verified.journal->Commit();
  if (!bytes.ok()) return bytes.status();
  auto journal = verified.journal->Reopen();
  if (!journal.ok()) return journal.status();
  const std::lock_guard lock(mutex_);
  StoreState next = state_;
  const auto step = Step(next, number, UpdateState::kStaged);
  if (!step.ok()) return step.status();
  (*step)->journal_bytes = *bytes;
  const AuditRecord event = Event(AuditAction::kStaged, next, number);
  if (auto status = Commit(std::move(next), event); !status.ok()) return status;
  journals_[number] = *std::move(journal);
  return absl::OkStatus();
}

}  // namespace espalier::updates
