// file_system.h — the few calls through which everything durable is written, so that tests can put
// a disk behind them that fails, loses power or runs full at any one of them.
//
//   write to a temporary name → Sync → Rename → SyncFolder        (atomic_file.h)
//
// Durable  What a file holds: after its Sync. That a name exists, has gone, or stands for another
//          file: after SyncFolder of each folder involved. Before that a crash may keep it or not.
// Errors   What errno says, with the path: NotFound, AlreadyExists, ResourceExhausted (disk full),
//          PermissionDenied, … After a Sync that failed the file's bytes are lost, whatever a
//          later Sync says: write them to another file.
// Threads  FileSystem is thread-safe. File: reads from any thread, one thread changes it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/updates/byte_source.h"

namespace espalier::updates {

// Closed by the destructor, without a Sync.
class File {
 public:
  virtual ~File() = default;
  // Adds some of `bytes` at the end, at least one, and says how many.
  virtual absl::StatusOr<size_t> Append(absl::string_view bytes) = 0;
  // May read fewer; 0 only at the end.
  virtual absl::StatusOr<size_t> ReadAt(uint64_t offset, void* to, size_t bytes) const = 0;
  virtual absl::StatusOr<uint64_t> Size() const = 0;
  virtual absl::Status Truncate(uint64_t size) = 0;
  virtual absl::Status Sync() = 0;
  virtual absl::Status Close() = 0;  // at most once, nothing else after it
};

enum class OpenMode {
  kRead,    // a file that exists
  kChange,  // the same, to read, append and truncate
  kCreate,  // a file that does not exist yet, to read and change
};

struct FolderEntry {
  std::string name;
  bool folder = false;
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // `permissions` count for kCreate, less the umask. A symbolic link is not followed.
  virtual absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode,
                                                     int permissions = 0666) = 0;
  // Replaces what is at `to`.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  // AlreadyExists when there is something at `to`: what link and unlink do, in one step and for
  // folders too.
  virtual absl::Status RenameNew(const std::string& from, const std::string& to) = 0;
  virtual absl::Status Unlink(const std::string& path) = 0;
  virtual absl::Status MakeFolder(const std::string& path) = 0;
  virtual absl::Status RemoveFolder(const std::string& path) = 0;  // an empty one
  virtual absl::Status SyncFolder(const std::string& path) = 0;
  // Ascending by name.
  virtual absl::StatusOr<std::vector<FolderEntry>> List(const std::string& path) = 0;
  virtual absl::StatusOr<bool> Exists(const std::string& path) = 0;
};

FileSystem& PosixFileSystem();

std::string FolderOf(const std::string& path);  // "." for a name alone

absl::Status AppendAll(File& file, absl::string_view bytes);
// DataLoss when the file ends before.
absl::Status ReadExactly(const File& file, uint64_t offset, void* to, uint64_t bytes);
// ResourceExhausted when it is larger.
absl::StatusOr<std::string> ReadWhole(FileSystem& files, const std::string& path,
                                      uint64_t max_bytes);
// Unless it is there; its name is durable in either case.
absl::Status EnsureFolder(FileSystem& files, const std::string& path);
// Whether there was one or not.
absl::Status UnlinkIfThere(FileSystem& files, const std::string& path);

// A file as a source of a delta.
class OpenedSource final : public ByteSource {
 public:
  static absl::StatusOr<std::shared_ptr<const ByteSource>> Open(FileSystem& files,
                                                                const std::string& path);
  const std::string& name() const override { return name_; }
  uint64_t size() const override { return size_; }
  absl::Status ReadAt(uint64_t offset, void* to, uint64_t bytes) const override;

 private:
  OpenedSource(std::unique_ptr<File> file, std::string name, uint64_t size)
      : file_(std::move(file)), name_(std::move(name)), size_(size) {}

  std::unique_ptr<File> file_;
  std::string name_;
  uint64_t size_;
};

}  // namespace espalier::updates
