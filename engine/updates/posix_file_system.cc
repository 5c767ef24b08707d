#include <fcntl.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"
#include "engine/updates/file_system.h"

namespace espalier::updates {
namespace {

absl::Status Failed(absl::string_view what, const std::string& path) {
  return absl::ErrnoToStatus(
      errno, absl::StrCat(what, " ", formats::Quoted(path, formats::kShownPathBytes)));
}

absl::Status Checked(int result, absl::string_view what, const std::string& path) {
  return result == 0 ? absl::OkStatus() : Failed(what, path);
}

class PosixFile final : public File {
 public:
  PosixFile(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}
  ~PosixFile() override {
    if (descriptor_ >= 0) close(descriptor_);
  }
  absl::StatusOr<size_t> Append(absl::string_view bytes) override {
    for (;;) {
      const ssize_t written = write(descriptor_, bytes.data(), bytes.size());
      if (written >= 0) return static_cast<size_t>(written);
      if (errno != EINTR) return Failed("cannot write", path_);
    }
  }
  absl::StatusOr<size_t> ReadAt(uint64_t offset, void* to, size_t bytes) const override {
    for (;;) {
      const ssize_t got = pread(descriptor_, to, bytes, static_cast<off_t>(offset));
      if (got >= 0) return static_cast<size_t>(got);
      if (errno != EINTR) return Failed("cannot read", path_);
    }
  }
  absl::StatusOr<uint64_t> Size() const override {
    struct stat info;
    if (fstat(descriptor_, &info) != 0) return Failed("cannot look at", path_);
    return static_cast<uint64_t>(info.st_size);
  }
  absl::Status Truncate(uint64_t size) override {
    return Checked(ftruncate(descriptor_, static_cast<off_t>(size)), "cannot cut", path_);
  }
  absl::Status Sync() override { return Checked(fsync(descriptor_), "cannot sync", path_); }
  absl::Status Close() override {
    return Checked(close(std::exchange(descriptor_, -1)), "cannot close", path_);
  }

 private:
  int descriptor_;
  const std::string path_;
};

bool IsThere(const std::string& path) {
  struct stat info;
  return lstat(path.c_str(), &info) == 0;
}

bool IsFolder(const std::string& path) {
  struct stat info;
  return lstat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

// Fails with EEXIST when there is something at `to`. File systems that do not know the flag answer
// EINVAL; there a link does the same for files, and folders are checked first.
int RenameWithoutReplacing(const std::string& from, const std::string& to) {
  if (syscall(SYS_renameat2, AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0)
    return 0;
  if (errno != EINVAL && errno != ENOSYS) return -1;
  if (!IsFolder(from)) {
    if (link(from.c_str(), to.c_str()) != 0) return -1;
    unlink(from.c_str());
    return 0;
  }
  if (IsThere(to)) {
    errno = EEXIST;
    return -1;
  }
  return rename(from.c_str(), to.c_str());
}

class Posix final : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode,
                                             int permissions) override {
    const int flags = mode == OpenMode::kRead     ? O_RDONLY
                      : mode == OpenMode::kChange ? O_RDWR | O_APPEND
                                                  : O_RDWR | O_APPEND | O_CREAT | O_EXCL;
    const int descriptor = open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, permissions);
    if (descriptor < 0)
      return Failed(mode == OpenMode::kCreate ? "cannot create" : "cannot open", path);
    return std::make_unique<PosixFile>(descriptor, path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return Checked(rename(from.c_str(), to.c_str()), "cannot replace", to);
  }
  absl::Status RenameNew(const std::string& from, const std::string& to) override {
    return Checked(RenameWithoutReplacing(from, to), "cannot create", to);
  }
  absl::Status Unlink(const std::string& path) override {
    return Checked(unlink(path.c_str()), "cannot delete", path);
  }
  absl::Status MakeFolder(const std::string& path) override {
    return Checked(mkdir(path.c_str(), 0777), "cannot create", path);
  }
  absl::Status RemoveFolder(const std::string& path) override {
    return Checked(rmdir(path.c_str()), "cannot delete", path);
  }
  absl::Status SyncFolder(const std::string& path) override {
    const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return Failed("cannot open", path);
    const auto status = Checked(fsync(descriptor), "cannot sync", path);
    close(descriptor);
    return status;
  }
  absl::StatusOr<std::vector<FolderEntry>> List(const std::string& path) override {
    std::error_code error;
    std::filesystem::directory_iterator next(path, error), end;
    std::vector<FolderEntry> entries;
    while (!error && next != end) {
      entries.push_back({next->path().filename().string(), IsFolder(next->path().string())});
      next.increment(error);
    }
    if (error) {
      errno = error.value();
      return Failed("cannot list", path);
    }
    std::sort(entries.begin(), entries.end(),
              [](const FolderEntry& a, const FolderEntry& b) { return a.name < b.name; });
    return entries;
  }
  absl::StatusOr<bool> Exists(const std::string& path) override {
    if (IsThere(path)) return true;
    if (errno == ENOENT || errno == ENOTDIR) return false;
    return Failed("cannot look at", path);
  }
};

}  // namespace

FileSystem& PosixFileSystem() {
  static Posix* const files = new Posix;
  return *files;
}

}  // namespace espalier::updates
