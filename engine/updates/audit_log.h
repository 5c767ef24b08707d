// audit_log.h — what happened to the versions of a model: who signed, when, which digests served
// before and after. Records are only ever added, each with the digest of the one before, so that one
// that was changed or taken out shows.
//
// Bytes    About 130 a record. At `max_bytes` / 2 the log becomes "<path>.old", in place of the one
//          before, and a new one begins that continues its chain.
// Crash    A record that was not synced may be torn; Open cuts it off. The owner knows which records
//          it wanted to add, and adds the last ones again.
// Errors   What the file system says; Unimplemented: newer. Damage is no error: Open says where the
//          sound part ends.
// Thread-compatible: the store calls it under its mutex.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/updates/bytes.h"
#include "engine/updates/file_system.h"
#include "engine/updates/sha256.h"
#include "engine/updates/signing.h"

namespace espalier::updates {

enum class AuditAction : uint8_t {
  kBase = 1,      // a version of the repository was seen first
  kRefused = 2,   // a delta failed a check, or a version was given up before it served
  kVerified = 3,  // every check passed
  kStaged = 4,
  kCanary = 5,
  kActivated = 6,
  kConfirmed = 7,
  kRolledBack = 8,  // from `number`; after: what serves now
  kQuarantined = 9,
  kCompacted = 10,  // `number` has an anchor now
  kLost = 11,       // records before this one, or files of versions: `reason` says what
};
inline constexpr uint8_t kAuditActions = 11;
const char* NameOf(AuditAction action);  // "activated", …

struct AuditRecord {
  int64_t sequence = 0;  // rises by one
  int64_t seconds = 0;   // since 1970
  AuditAction action = AuditAction::kBase;
  int64_t number = 0;        // the version; 0: none was known
  Digest before{}, after{};  // the weights that served
  std::vector<KeyId> signers;
  std::string reason;  // cut to kMaxReasonBytes

  bool operator==(const AuditRecord&) const = default;
};

inline constexpr size_t kMaxReasonBytes = 512;

void SerializeAudit(ByteWriter& out, const AuditRecord& record);
absl::StatusOr<AuditRecord> ParseAudit(ByteReader& reader);

class AuditLog {
 public:
  // Creates the log when there is none.
  static absl::StatusOr<AuditLog> Open(FileSystem& files, std::string path, uint64_t max_bytes);

  // The last one that is there; 0 for none.
  int64_t last_sequence() const { return last_sequence_; }
  // Bytes behind the last sound record that Open found (and cut off).
  uint64_t damaged_bytes() const { return damaged_bytes_; }
  // Durable when it returns. After an error none, some or all of them may be there, and the next
  // Append writes the log anew.
  absl::Status Append(absl::Span<const AuditRecord> records);
  // Writes the sound part as a file of its own. What an earlier process could not sync is not durable
  // though it can be read, and no later sync of that file helps.
  absl::Status WriteAnew();
  // The newest `most`, oldest first, of this file and the one before.
  absl::StatusOr<std::vector<AuditRecord>> Read(size_t most) const;

 private:
  struct Scan {
    std::vector<AuditRecord> records;
    Digest chain{};
    uint64_t sound_bytes = 0, size = 0;
  };
  AuditLog(FileSystem& files, std::string path, uint64_t max_bytes)
      : files_(&files), path_(std::move(path)), max_bytes_(max_bytes) {}
  static absl::StatusOr<Scan> ScanFile(FileSystem& files, const std::string& path,
                                       uint64_t max_bytes);
  absl::Status StartFile();
  absl::Status Rotate();

  FileSystem* files_;
  std::string path_;
  uint64_t max_bytes_;
  std::unique_ptr<File> file_;
  Digest chain_{};
  uint64_t size_ = 0, damaged_bytes_ = 0;
  int64_t last_sequence_ = 0;
  bool suspect_ = false;  // what is behind size_ is unknown
};

}  // namespace espalier::updates
