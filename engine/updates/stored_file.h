// stored_file.h — what every file of a version store begins with, and files that are sealed: written
// whole, with the digest of all their bytes at the end. STORE.md has the bytes.
//
//   magic (8)  0x93 "ESV" kind "\r\n\n"     version (2)     blocks: size (4), bytes     SHA-256 (32)
//
// Errors   Unimplemented: written by a newer build, naming both versions. DataLoss: damaged.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/updates/atomic_file.h"
#include "engine/updates/file_system.h"
#include "engine/updates/sha256.h"

namespace espalier::updates {

enum class StoredKind : char {
  kState = 'S',
  kJournal = 'J',
  kAnchor = 'A',
  kAuditLog = 'L',
  kPartialSums = 'P',
  kFleet = 'F',
};

inline constexpr uint64_t kStoredHeadBytes = 10;
inline constexpr uint64_t kMaxBlockBytes = 256 << 20;

// The newest that this build knows; it reads all from 1 on. A file is written in the oldest version that can say what
// it says: an older build, gone back to, refuses only what it would not understand.
constexpr uint16_t NewestStoredVersion(StoredKind kind) {
  return kind == StoredKind::kState || kind == StoredKind::kFleet ? 2 : 1;
}

std::string StoredHead(StoredKind kind, uint16_t version = 1);
// `head` is the first kStoredHeadBytes of the file, fewer if it is shorter. The file's version.
absl::StatusOr<uint16_t> ReadStoredHead(StoredKind kind, absl::string_view head,
                                        absl::string_view path);
absl::Status Damaged(absl::string_view path, absl::string_view how);

// A path of digits alone, whatever the number.
std::string NumberedPath(absl::string_view folder, int64_t number, absl::string_view extension);

class SealedWriter {
 public:
  static absl::StatusOr<SealedWriter> Create(FileSystem& files, const std::string& path,
                                             StoredKind kind, uint16_t version = 1);
  absl::Status AppendBlock(absl::string_view bytes);
  uint64_t size() const { return file_.size(); }  // so far
  // Seals the file, replaces what is at the path, and says how large it is.
  absl::StatusOr<uint64_t> Commit();

 private:
  explicit SealedWriter(AtomicFile file) : file_(std::move(file)) {}
  absl::Status Append(absl::string_view bytes);

  AtomicFile file_;
  std::unique_ptr<Sha256> sha_ = std::make_unique<Sha256>();
};

// Reads the blocks in order. What it gives may be believed once End() is ok.
class SealedReader {
 public:
  static absl::StatusOr<SealedReader> Open(FileSystem& files, const std::string& path,
                                           StoredKind kind);
  absl::StatusOr<std::string> NextBlock(uint64_t max_bytes = kMaxBlockBytes);
  // Where the block that was read last begins.
  uint64_t block_offset() const { return block_offset_; }
  // Bytes of a block once more, any thread; as they are now.
  absl::Status ReadAgain(uint64_t offset, std::string& to) const;
  bool AtEnd() const { return offset_ + sizeof(Digest) >= size_; }
  // Nothing follows, and the digest is right.
  absl::Status End();
  const std::string& path() const { return path_; }
  uint16_t version() const { return version_; }
  uint64_t size() const { return size_; }

 private:
  SealedReader(std::unique_ptr<File> file, std::string path, uint64_t size)
      : file_(std::move(file)), path_(std::move(path)), size_(size) {}
  absl::StatusOr<std::string> Read(uint64_t bytes);

  std::unique_ptr<File> file_;
  std::string path_;
  uint64_t size_, offset_ = 0, block_offset_ = 0;
  uint16_t version_ = 0;
  std::unique_ptr<Sha256> sha_ = std::make_unique<Sha256>();
};

}  // namespace espalier::updates
