// store_state.h — what a version store knows: the versions of a model, which one is active, and the
// counters that never go back. One file, replaced as a whole. STORE.md has the bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/updates/audit_log.h"
#include "engine/updates/file_system.h"
#include "engine/updates/probation.h"
#include "engine/updates/sha256.h"
#include "engine/updates/signing.h"
#include "engine/updates/update_state.h"

namespace espalier::updates {

inline constexpr int64_t kMaxVersionNumber = int64_t{1} << 62;
inline constexpr size_t kMaxStoredVersions = 65536;
inline constexpr size_t kMaxQuarantinedDigests = 1024;
inline constexpr size_t kMaxPendingAudit = 256;

struct VersionRecord {
  int64_t number = 0;
  Digest weights{};
  UpdateState state = UpdateState::kVerified;
  bool repository = false;  // the repository has its weights
  int64_t parent = 0;       // the version that its delta was made for; 0: it came with no delta
  int64_t sequence = 0;     // of its delta
  int64_t replaced = 0;     // what was active before it; where a rollback leads
  int64_t activation = 0;   // rises with every activation of the model; 0: never active
  int64_t seconds = 0;      // when it took this state, since 1970
  Digest delta{};           // of the delta's file
  uint64_t delta_bytes = 0, journal_bytes = 0, anchor_bytes = 0;  // 0: there is no such file
  std::vector<KeyId> signers;
  std::string reason;  // of a refusal, a rollback or a quarantine

  bool operator==(const VersionRecord&) const = default;
};

struct StoreState {
  std::string model;
  int64_t active = 0;
  std::optional<Probation> probation;  // of the active version; none: it is confirmed
  int64_t unconfirmed_starts = 0;      // how often a store was opened during this probation
  int64_t accepted_sequence = 0;       // the highest that was ever activated
  int64_t used_up = 0;                 // numbers up to here are free no more, whoever had them
  int64_t activations = 0;
  int64_t next_audit = 1;
  std::vector<VersionRecord> versions;  // ascending by number
  std::vector<Digest> quarantined;      // weights of versions that are in `versions` no more
  std::vector<AuditRecord> pending;     // to be in the audit log; those that are not are added

  VersionRecord* Find(int64_t number);  // null: there is none
  const VersionRecord* Find(int64_t number) const;
  VersionRecord& Add(VersionRecord record);  // its number must be new
  bool IsQuarantined(int64_t number) const;
  const Digest& active_weights() const { return Find(active)->weights; }
  bool operator==(const StoreState&) const = default;
};

// Durable when it returns.
absl::Status WriteStoreState(FileSystem& files, const std::string& path, const StoreState& state);
// NotFound; DataLoss: damaged, or not a state that a store can be in; Unimplemented: newer.
absl::StatusOr<StoreState> ReadStoreState(FileSystem& files, const std::string& path);

}  // namespace espalier::updates
