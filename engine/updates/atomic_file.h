// atomic_file.h — files and folders that are there whole or not at all: written beside their place
// under a name of their own, synced, renamed, and the folder synced.
//
// What is not committed is deleted when the object goes. After a crash a ".tmp-…" may be left;
// nothing reads it.
// Errors   What errno says, with the path. When Commit fails after the rename, the file may be in
//          its place without being there durably.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/updates/file_system.h"

namespace espalier::updates {

// What a temporary name has after the name of its place.
inline constexpr absl::string_view kTemporaryMark = ".tmp-";

class AtomicFile {
 public:
  static absl::StatusOr<AtomicFile> Create(const std::string& path, int mode = 0666,
                                           FileSystem& files = PosixFileSystem());
  // AlreadyExists at once when there is something at the path, a symbolic link or a device included:
  // for CommitNew after long work.
  static absl::StatusOr<AtomicFile> CreateNew(const std::string& path, int mode = 0666,
                                              FileSystem& files = PosixFileSystem());
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  absl::Status Append(absl::string_view bytes);
  uint64_t size() const { return size_; }
  // Of what was appended.
  absl::Status ReadAt(uint64_t offset, void* to, uint64_t bytes) const;
  // Replaces what is at the path.
  absl::Status Commit();
  // AlreadyExists instead of replacing.
  absl::Status CommitNew();

 private:
  AtomicFile(FileSystem& files, std::unique_ptr<File> file, std::string path,
             std::string temporary);
  absl::Status Sync();
  absl::Status Renamed();

  FileSystem* files_;
  std::unique_ptr<File> file_;
  std::string path_, temporary_;
  uint64_t size_ = 0;
};

// A new folder for files without subfolders; the path must not exist when it is committed.
class AtomicFolder {
 public:
  static absl::StatusOr<AtomicFolder> Create(const std::string& path,
                                             FileSystem& files = PosixFileSystem());
  AtomicFolder(AtomicFolder&& other) noexcept;
  AtomicFolder& operator=(AtomicFolder&&) = delete;
  ~AtomicFolder();

  const std::string& temporary_path() const { return temporary_; }
  absl::Status Commit();  // its files have been committed

 private:
  AtomicFolder(FileSystem& files, std::string path, std::string temporary);

  FileSystem* files_;
  std::string path_, temporary_;
};

}  // namespace espalier::updates
