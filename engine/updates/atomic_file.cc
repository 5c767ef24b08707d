#include "engine/updates/atomic_file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"

namespace espalier::updates {
namespace {

absl::Status Failed(absl::string_view what, const std::string& path) {
  return absl::ErrnoToStatus(
      errno, absl::StrCat(what, " ", formats::Quoted(path, formats::kShownPathBytes)));
}

std::string WithoutSlash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

std::string TemporaryName(const std::string& path) {
  static std::atomic<uint64_t> number = 0;
  return absl::StrCat(path, ".tmp-", getpid(), "-", number.fetch_add(1));
}

absl::Status SyncFolder(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return Failed("cannot open", path);
  const int result = fsync(descriptor);
  const absl::Status status = result == 0 ? absl::OkStatus() : Failed("cannot sync", path);
  close(descriptor);
  return status;
}

// Fails with EEXIST when there is something at `to`. File systems that do not know the flag answer
// EINVAL; there a link does the same for files, and folders are checked first.
int RenameNew(const std::string& from, const std::string& to, bool folder) {
  if (syscall(SYS_renameat2, AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0)
    return 0;
  if (errno != EINVAL && errno != ENOSYS) return -1;
  if (!folder) {
    if (link(from.c_str(), to.c_str()) != 0) return -1;
    unlink(from.c_str());
    return 0;
  }
  struct stat info;
  if (lstat(to.c_str(), &info) == 0) {
    errno = EEXIST;
    return -1;
  }
  return rename(from.c_str(), to.c_str());
}

absl::Status Exists(const std::string& path) {
  return absl::AlreadyExistsError(
      absl::StrCat(formats::Quoted(path, formats::kShownPathBytes), " exists already"));
}

}  // namespace

AtomicFile::AtomicFile(int descriptor, std::string path, std::string temporary)
    : descriptor_(descriptor), path_(std::move(path)), temporary_(std::move(temporary)) {}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, "")),
      size_(other.size_) {}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) close(descriptor_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

absl::StatusOr<AtomicFile> AtomicFile::Create(const std::string& path, int mode) {
  const std::string temporary = TemporaryName(path);
  const int descriptor =
      open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode);
  if (descriptor < 0) return Failed("cannot create", temporary);
  return AtomicFile(descriptor, path, temporary);
}

absl::Status AtomicFile::Append(absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return Failed("cannot write", temporary_);
    bytes.remove_prefix(static_cast<size_t>(written));
    size_ += static_cast<uint64_t>(written);
  }
  return absl::OkStatus();
}

absl::Status AtomicFile::ReadAt(uint64_t offset, void* to, uint64_t bytes) const {
  while (bytes > 0) {
    const ssize_t got = pread(descriptor_, to, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Failed("cannot read", temporary_);
    if (got == 0) return absl::DataLossError("a temporary file has become shorter");
    to = static_cast<char*>(to) + got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
  return absl::OkStatus();
}

absl::Status AtomicFile::Sync() {
  if (fsync(descriptor_) != 0) return Failed("cannot sync", temporary_);
  const int result = close(std::exchange(descriptor_, -1));
  return result == 0 ? absl::OkStatus() : Failed("cannot close", temporary_);
}

absl::Status AtomicFile::Commit() {
  if (auto status = Sync(); !status.ok()) return status;
  if (rename(temporary_.c_str(), path_.c_str()) != 0) return Failed("cannot replace", path_);
  temporary_.clear();
  return SyncFolder(FolderOf(path_));
}

absl::Status AtomicFile::CommitNew() {
  if (auto status = Sync(); !status.ok()) return status;
  if (RenameNew(temporary_, path_, false) != 0)
    return errno == EEXIST ? Exists(path_) : Failed("cannot create", path_);
  temporary_.clear();
  return SyncFolder(FolderOf(path_));
}

AtomicFolder::AtomicFolder(std::string path, std::string temporary)
    : path_(std::move(path)), temporary_(std::move(temporary)) {}

AtomicFolder::AtomicFolder(AtomicFolder&& other) noexcept
    : path_(std::move(other.path_)), temporary_(std::exchange(other.temporary_, "")) {}

AtomicFolder::~AtomicFolder() {
  if (temporary_.empty()) return;
  std::error_code ignored;
  std::filesystem::remove_all(temporary_, ignored);
}

absl::StatusOr<AtomicFolder> AtomicFolder::Create(const std::string& path) {
  const std::string place = WithoutSlash(path);
  struct stat info;
  if (lstat(place.c_str(), &info) == 0) return Exists(place);
  const std::string temporary = TemporaryName(place);
  if (mkdir(temporary.c_str(), 0777) != 0) return Failed("cannot create", temporary);
  return AtomicFolder(place, temporary);
}

absl::Status AtomicFolder::Commit() {
  if (auto status = SyncFolder(temporary_); !status.ok()) return status;
  if (RenameNew(temporary_, path_, true) != 0)
    return errno == EEXIST ? Exists(path_) : Failed("cannot create", path_);
  temporary_.clear();
  return SyncFolder(FolderOf(path_));
}

}  // namespace espalier::updates
