// fleet_log.h — updates that many servers take together or not at all: what this one promised, and what
// was decided. Two phases:
//
//   Prepare on every participant, the first one first ──▶ Decide on the first ──▶ Decide on the others
//   each promises to activate the version                 this is the decision    they follow
//
// Decision The first participant's, once it is durable there; nobody activates before. It commits only
//          before the transaction expires, and aborts by itself then. Another participant that hears
//          nothing asks the first; until it knows it goes on serving what it serves, and takes part in
//          nothing else: it never guesses.
// Probation  The terms travel with the transaction. What is tried before a version serves (golden requests, a canary)
//          is tried before the promise, so that a version that fails it anywhere is served nowhere. From its commit on
//          each participant judges the version for itself, and gives it up for itself: a fault of one server takes it
//          from nobody else, at the price of a split fleet, which that server's audit log and events tell.
// Disk     One sealed file, replaced as a whole (STORE.md, kind F). The newest kKept that are done, and
//          all others.
// Errors   InvalidArgument: no such transaction can be. FailedPrecondition: another one is open, or it
//          was decided otherwise. NotFound. DataLoss, Unimplemented: as all files of a store.
// Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/updates/file_system.h"
#include "engine/updates/probation.h"

namespace espalier::updates {

enum class FleetDecision : uint8_t { kUndecided = 0, kCommit = 1, kAbort = 2 };
const char* NameOf(FleetDecision decision);  // "UNDECIDED", "COMMIT", "ABORT"

struct FleetTransaction {
  std::string id;                         // 1 to 64 of 0-9 A-Z a-z _ -
  int64_t version = 0;                    // to be activated
  std::vector<std::string> participants;  // addresses, 1 to kMaxParticipants; the first decides
  int64_t self = 0;                       // this server among them
  int64_t expires_seconds = 0;            // since 1970; no commit is decided later
  FleetDecision decision = FleetDecision::kUndecided;
  bool done = false;           // the decision was carried out here
  ProbationOptions probation;  // of the version, on every participant

  bool decides() const { return self == 0; }
  bool operator==(const FleetTransaction&) const = default;
};

class FleetLog {
 public:
  static constexpr size_t kKept = 64, kMaxParticipants = 1024, kMaxAddressBytes = 256;

  static absl::StatusOr<std::unique_ptr<FleetLog>> Open(FileSystem& files, const std::string& path);

  // The promise. The same transaction again is an OK.
  absl::Status Prepare(FleetTransaction transaction, int64_t now_seconds);
  // What is decided then: `decision`, or, where this server decides and the time is up, an abort.
  absl::StatusOr<FleetTransaction> Decide(const std::string& id, FleetDecision decision,
                                          int64_t now_seconds);
  absl::Status Done(const std::string& id);
  absl::StatusOr<FleetTransaction> Find(const std::string& id) const;
  // The newest that activated the version here; none: it came otherwise, or that is not kept any more.
  std::optional<FleetTransaction> Committed(int64_t version) const;
  // Undecided, or decided and not carried out; one at most.
  std::optional<FleetTransaction> Pending() const;

 private:
  FleetLog(FileSystem& files, std::string path) : files_(files), path_(std::move(path)) {}
  absl::Status Commit(std::vector<FleetTransaction> next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  FileSystem& files_;
  const std::string path_;
  mutable std::mutex mutex_;
  std::vector<FleetTransaction> transactions_ ABSL_GUARDED_BY(mutex_);  // oldest first
};

}  // namespace espalier::updates
