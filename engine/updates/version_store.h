// version_store.h — everything durable about the versions of one model: deltas received, verified
// and staged; which version is active; the journals that lead back; anchors; who did what when.
//
//   auto store = VersionStore::Open(state_dir, "digits", {3, digest}, options);
//   store->BeginReceive(file, bytes) → offset      store->Append(file, offset, …)     any number
//   store->FinishReceive(file)                     all bytes are there and durable
//   store->Verify(file, policy)                    journal written             RECEIVING → VERIFIED
//   store->Stage(verified)                         journal durable             VERIFIED → STAGED
//   store->Activate(number, probation)             the decision, its probation   STAGED → LIVE
//   store->Confirm(number) / Rollback(…) / Quarantine(number, reason)
//
// Truth    One file holds the state and is replaced as a whole; a call that returned OK has happened
//          for good. A call that failed has not happened, unless the process or the disk dies before
//          the next call succeeds: then a restart finds exactly the old or exactly the new state.
// Numbers  A version number names one set of bytes for ever, of the repository or of a delta. The
//          sequence of a delta must be above every one that was activated, and that mark never goes
//          back; rolling back needs no delta, so it does not meet it, and the next delta that a
//          publisher makes is above it in any case.
// Digests  Of the weights that were verified last, those of all blocks stay in memory (64 bytes for 16 Ki
//          elements, of two versions): the next delta costs what it touches. What it does not touch is read and
//          compared when it is loaded next, or anchored.
// Disk     The model repository is never written. Compact() keeps the active version, the ones that
//          wait, and the last that served; what they hang on (anchors, journals) stays with them.
// Memory   To verify: segments (journal.h), whatever the delta's size and the way to its base, and 64 bytes for every
//          65536 changes on that way.
// Errors   InvalidArgument: damaged or malicious. PermissionDenied: not signed as asked.
//          FailedPrecondition: for another base, an old sequence, a state that does not allow it.
//          AlreadyExists: it is here. NotFound. ResourceExhausted: a cap, or a full disk. DataLoss:
//          a file of the store is damaged. Unimplemented: a file of a newer build.
// Threads  Thread-safe. Calls that decide (Activate … Refuse) take the time of a few syncs and never
//          wait for one that receives, verifies, stages or compacts. All may block on the disk.
// One process only: the caller holds the lock of the state directory.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/updates/audit_log.h"
#include "engine/updates/file_system.h"
#include "engine/updates/journal.h"
#include "engine/updates/journal_chain.h"
#include "engine/updates/journal_file.h"
#include "engine/updates/partial_delta.h"
#include "engine/updates/receive.h"
#include "engine/updates/store_state.h"

namespace espalier::updates {

struct StoreOptions {
  FileSystem* files = &PosixFileSystem();
  // The weights of a version of the repository. Called without a lock held.
  std::function<absl::StatusOr<std::shared_ptr<const TensorReader>>(int64_t number)> repository;
  std::function<int64_t()> now_seconds;  // empty: the clock of the system
  uint64_t max_delta_bytes = uint64_t{4} << 30;
  int max_partial_deltas = 4;               // the one that waited longest goes first
  uint64_t piece_bytes = 256 << 10;         // what a crash may cost of a delta that comes in
  int max_waiting_versions = 64;            // VERIFIED, STAGED or CANARY
  int keep_versions = 16;                   // that served before; the last one stays in any case
  uint64_t keep_bytes = uint64_t{8} << 30;  // of their journals and deltas
  // Journals on the way from the weights of the repository to the active version, and from an anchor. Each is read for
  // each delta that comes; an anchor is written once for all of them.
  int max_first_chain = 8;
  int max_chain = 64;
  // Their bytes: half a second to read, on one core; and never more than the anchor that they begin at has.
  uint64_t max_chain_bytes = 128 << 20;
  uint64_t max_audit_bytes = 64 << 20;  // half of it is copied at each start
  int max_unconfirmed_starts = 3;       // then the version on probation is quarantined; 0: never
  bool compact_in_background = false;
  WorkerScope compactor_scope;  // of the thread that does
  JournalLimits journal_limits;
};

struct BaseVersion {
  int64_t number = 0;
  Digest weights{};
};

struct VerifiedDelta {
  Manifest manifest;
  std::unique_ptr<JournalWriter> journal;  // all but durable
  std::vector<KeyId> signers;
};

struct StoredDelta {
  int64_t from = 0, to = 0;
  std::shared_ptr<const ByteSource> source;
};

class VersionStore {
 public:
  // `base` is the version of the repository that was loaded. In an empty store it becomes the active
  // one; later another base is STAGED. FailedPrecondition when its number is known with another
  // digest.
  static absl::StatusOr<std::unique_ptr<VersionStore>> Open(const std::string& state_dir,
                                                            const std::string& model,
                                                            const BaseVersion& base,
                                                            StoreOptions options);
  ~VersionStore();
  VersionStore(const VersionStore&) = delete;

  // What Open missed of versions that are not active, and that are not kept any more; empty: nothing.
  std::string lost_files() const {
    const std::lock_guard lock(mutex_);
    return lost_files_;
  }

  // `file` is the SHA-256 of the delta's file. Returns the offset to go on at.
  absl::StatusOr<uint64_t> BeginReceive(const Digest& file, uint64_t bytes);
  absl::Status Append(const Digest& file, uint64_t offset, absl::string_view bytes);
  // The head was parsed, nothing in it was believed.
  absl::StatusOr<Manifest> FinishReceive(const Digest& file);
  absl::Status AbandonReceive(const Digest& file);

  // Every check of receive.h, the numbers, and the model. `base`: the weights of the version that it
  // is made for, if the caller has them at hand; null: they are read from disk. What fails for good
  // is deleted. Once VERIFIED it may be called again, after a restart for example.
  absl::StatusOr<VerifiedDelta> Verify(const Digest& file, ReceivePolicy policy,
                                       const TensorReader* base = nullptr);
  absl::Status Stage(VerifiedDelta verified);
  absl::Status StartCanary(int64_t number);
  absl::Status EndCanary(int64_t number);  // undecided: STAGED again
  // Without a probation it is confirmed at once.
  absl::Status Activate(int64_t number, std::optional<Probation> probation = std::nullopt);
  absl::Status Confirm(int64_t number);
  // To what the active version replaced, or to another one that served. Returns its number.
  absl::StatusOr<int64_t> Rollback(absl::string_view reason, int64_t to = 0);
  // The active version is rolled back in the same step.
  absl::Status Quarantine(int64_t number, absl::string_view reason);
  absl::Status Refuse(int64_t number, absl::string_view reason);

  // A version of the repository that came after Open, on Open's terms.
  absl::Status AddBase(const BaseVersion& base);

  StoreState List() const;
  // The newest, oldest first.
  absl::StatusOr<std::vector<AuditRecord>> Audit(size_t most) const;
  // From version to version, backwards where needed. NotFound when a version is not kept.
  absl::StatusOr<JournalChain> JournalsBetween(int64_t from, int64_t to) const;
  // For a server that has `from`. FailedPrecondition when `to` was not made from it.
  absl::StatusOr<std::vector<StoredDelta>> DeltasBetween(int64_t from, int64_t to) const;
  // From the nearest anchor or version of the repository; its digest is the caller's to check.
  absl::StatusOr<std::shared_ptr<const TensorReader>> Weights(int64_t number) const;
  // What they are, without the way to them being read.
  absl::StatusOr<std::vector<TensorInfo>> Tensors(int64_t number) const;

  // Writes an anchor if the chain has become long, then lets go of what is kept no more.
  absl::Status Compact();

 private:
  struct Receiving {
    std::unique_ptr<PartialDelta> partial;
    int64_t touched = 0;
  };
  struct Edge {
    int64_t from = 0, to = 0;
    bool forward = true;
    std::string path;
    JournalEnds ends;  // of the file
  };

  VersionStore(std::string folder, StoreOptions options);
  absl::Status Load(const std::string& model, const BaseVersion& base);
  absl::Status MakeFolders(const std::string& state_dir);
  absl::Status OpenAudit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AdmitBase(const BaseVersion& base) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AfterRestart() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckNeverUsed(const BaseVersion& base) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckFiles(int64_t base) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckFile(const std::string& path, uint64_t bytes) const;
  absl::Status DeleteOrphans() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  int64_t Now() const;
  std::string StatePath() const { return folder_ + "/state"; }
  std::string Incoming() const { return folder_ + "/incoming"; }
  std::string JournalPath(int64_t number) const;
  std::string AnchorPath(int64_t number) const;
  std::string DeltaPath(int64_t number) const;

  absl::Status Commit(StoreState next, AuditRecord event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Settle(bool decides = false) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WriteState(const StoreState& state, bool decides) const;
  void FlushAudit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LogRefusal(int64_t number, const absl::Status& status);
  AuditRecord Event(AuditAction action, const StoreState& next, int64_t number,
                    absl::string_view reason = {}) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<VersionRecord*> Step(StoreState& state, int64_t number, UpdateState to,
                                      absl::string_view reason = {}) const;
  absl::Status StepAndCommit(int64_t number, UpdateState to, AuditAction action,
                             absl::string_view reason = {});
  absl::Status MakeActive(StoreState& next, int64_t number) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<int64_t> GiveUpActive(StoreState& next, UpdateState as, int64_t to,
                                       absl::string_view reason) const;

  absl::Status MakeRoomForPartial(const Digest& coming);
  absl::StatusOr<DeltaFile> OpenDelta(const Digest& file) const;
  absl::StatusOr<VerifiedDelta> Check(const DeltaFile& delta, ReceivePolicy policy,
                                      const TensorReader* base);
  absl::Status CheckNumbers(const Manifest& manifest) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckTargetNumber(const Manifest& manifest) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Admit(const Digest& file, uint64_t bytes, const VerifiedDelta& verified);
  absl::Status MoveDelta(const VersionRecord& record) const;

  absl::StatusOr<std::vector<Edge>> EdgesBetween(int64_t from, int64_t to) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::vector<Edge>> EdgesAlong(const std::vector<int64_t>& path) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  struct Rooted {
    std::shared_ptr<const TensorReader> root;
    std::vector<Edge> edges;  // from it
  };
  absl::StatusOr<Rooted> OpenNearestRoot(int64_t number) const;
  absl::StatusOr<std::shared_ptr<const JournalOnDisk>> OpenEdge(const Edge& edge) const;
  absl::StatusOr<std::shared_ptr<const TensorReader>> OpenRoot(const VersionRecord& root) const;
  int64_t AnchorDue() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CompactInBackground();

  const std::string folder_;
  const StoreOptions options_;
  FileSystem& files_;

  // Order: compaction_, files_kept_, receiving_mutex_, mutex_.
  std::mutex compaction_;
  mutable std::shared_mutex files_kept_;  // shared: files of the state that was seen stay
  mutable std::mutex mutex_;
  StoreState state_ ABSL_GUARDED_BY(mutex_);
  // By digest of the weights; of the last delta's base, if they were known, and target.
  std::map<Digest, std::shared_ptr<const BlockDigests>> blocks_ ABSL_GUARDED_BY(mutex_);
  // By version; those that were written or read since the store was opened and are kept still.
  mutable std::map<int64_t, std::shared_ptr<const JournalOnDisk>> journals_ ABSL_GUARDED_BY(mutex_);
  bool unsettled_ ABSL_GUARDED_BY(mutex_) = false;  // the disk may have another state than state_
  std::unique_ptr<AuditLog> audit_ ABSL_GUARDED_BY(mutex_);
  // Records up to this one are in the log, but may not be durable there; 0: all are.
  int64_t unsure_audit_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string lost_files_ ABSL_GUARDED_BY(mutex_);

  std::mutex receiving_mutex_;
  std::map<Digest, Receiving> receiving_ ABSL_GUARDED_BY(receiving_mutex_);
  std::set<Digest> received_ ABSL_GUARDED_BY(receiving_mutex_);
  int64_t touches_ ABSL_GUARDED_BY(receiving_mutex_) = 0;

  std::condition_variable compaction_wanted_;
  bool wanted_ ABSL_GUARDED_BY(mutex_) = false, stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread compactor_;
};

}  // namespace espalier::updates
