#include "engine/formats/regular_file.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/formats/names.h"

namespace espalier::formats {
namespace {

// O_NONBLOCK: opening a FIFO returns at once instead of waiting for a writer; no effect on regular
// files.
constexpr int kReadFlags = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;

// A kernel without full preemption copies page-cache folios of megabytes without a pause, and lets nobody
// else have the processor meanwhile; between two calls it does.
constexpr int64_t kMaxReadBytes = int64_t{128} << 10;

std::string QuotedPath(const std::string& path) { return Quoted(path, kShownPathBytes); }

const char* KindOf(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

absl::Status CannotOpen(int error, const std::string& path) {
  return absl::ErrnoToStatus(error, absl::StrCat("cannot open ", QuotedPath(path)));
}

absl::Status Changed(const std::string& path, int64_t expected, int64_t got) {
  return absl::InvalidArgumentError(absl::StrCat(
      QuotedPath(path), " changed while it was read: expected ", expected, " bytes, got ", got));
}

int OpenAt2(int directory, const std::string& relative, int flags) {
  open_how how = {};
  how.flags = static_cast<uint64_t>(flags);
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
  return static_cast<int>(syscall(SYS_openat2, directory, relative.c_str(), &how, sizeof(how)));
}

}  // namespace

bool IsPathBeneath(absl::string_view path) {
  while (path.size() > 2 && path.substr(0, 2) == "./") path.remove_prefix(2);
  if (path.find('\0') != absl::string_view::npos) return false;
  for (absl::string_view component : absl::StrSplit(path, '/')) {
    if (component.empty() || component == "." || component == "..") return false;
  }
  return true;
}

int OpenWithoutLinks(int directory, const std::string& relative, int flags) {
  int current = directory;
  size_t begin = 0;
  for (;;) {
    const size_t slash = relative.find('/', begin);
    const bool last = slash == std::string::npos;
    const std::string component = relative.substr(begin, last ? slash : slash - begin);
    const int next = openat(current, component.c_str(),
                            O_NOFOLLOW | (last ? flags : O_PATH | O_DIRECTORY | O_CLOEXEC));
    const int error = errno;
    if (current != directory) close(current);
    errno = error;
    if (next < 0 || last) return next;
    current = next;
    begin = slash + 1;
  }
}

absl::StatusOr<RegularFile> RegularFile::Adopt(int descriptor, std::string path) {
  RegularFile file(descriptor, std::move(path));
  struct stat info;
  if (fstat(descriptor, &info) != 0) return CannotOpen(errno, file.path_);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(
        QuotedPath(file.path_), " is ", KindOf(info.st_mode), ", expected a regular file"));
  }
  file.size_ = info.st_size;
  file.modified_ = info.st_mtim;
  return file;
}

absl::StatusOr<RegularFile> RegularFile::Open(const std::string& path) {
  if (path.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError("a file name must not contain a NUL byte");
  }
  const int descriptor = open(path.c_str(), kReadFlags);
  if (descriptor >= 0) return Adopt(descriptor, path);
  const int error = errno;
  struct stat info;
  if (error == ENOENT && lstat(path.c_str(), &info) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(QuotedPath(path), " is a symbolic link to a file that does not exist"));
  }
  if (error == ENXIO) {  // a socket, or a device without a driver
    return absl::InvalidArgumentError(
        absl::StrCat(QuotedPath(path), " is a socket or device, expected a regular file"));
  }
  return CannotOpen(error, path);
}

absl::StatusOr<RegularFile> RegularFile::OpenBeneath(const std::string& directory,
                                                     const std::string& relative) {
  if (!IsPathBeneath(relative)) {
    return absl::InvalidArgumentError("expected a path below the model's folder, without '..'");
  }
  const std::string path = absl::StrCat(directory, "/", relative);
  const int base = open(directory.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (base < 0) return CannotOpen(errno, directory);
  int descriptor = OpenAt2(base, relative, kReadFlags);
  // ENOSYS: kernel before 5.6 or a sandbox; EPERM: older container seccomp profiles.
  if (descriptor < 0 && (errno == ENOSYS || errno == EPERM)) {
    descriptor = OpenWithoutLinks(base, relative, kReadFlags);
  }
  const int error = errno;
  close(base);
  if (descriptor >= 0) return Adopt(descriptor, path);
  if (error == EXDEV || error == ELOOP) {
    return absl::InvalidArgumentError(
        absl::StrCat(QuotedPath(path), " leads out of the model's folder by a symbolic link"));
  }
  return CannotOpen(error, path);
}

RegularFile::RegularFile(RegularFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      path_(std::move(other.path_)),
      size_(other.size_),
      modified_(other.modified_) {}

RegularFile& RegularFile::operator=(RegularFile&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(path_, other.path_);
  std::swap(size_, other.size_);
  std::swap(modified_, other.modified_);
  return *this;
}

RegularFile::~RegularFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

absl::Status RegularFile::ReadAt(int64_t offset, void* to, int64_t bytes) const {
  int64_t done = 0;
  while (done < bytes) {
    const ssize_t got =
        pread(descriptor_, static_cast<std::byte*>(to) + done,
              static_cast<size_t>(std::min(bytes - done, kMaxReadBytes)), offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", QuotedPath(path_)));
    if (got == 0) {
      return absl::InvalidArgumentError(absl::StrCat(QuotedPath(path_), " ends early: expected ",
                                                     bytes, " bytes at offset ", offset, ", got ",
                                                     done));
    }
    done += got;
  }
  return absl::OkStatus();
}

absl::StatusOr<Buffer> RegularFile::ReadAll(int64_t max_bytes) const {
  if (size_ > max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat(QuotedPath(path_), " has ", size_, " bytes, the limit is ", max_bytes));
  }
  auto buffer = Buffer::Allocate(static_cast<size_t>(size_));
  if (!buffer.ok()) return buffer.status();
  if (auto status = ReadAt(0, buffer->data(), size_); !status.ok()) return status;
  if (auto status = CheckUnchanged(); !status.ok()) return status;
  return buffer;
}

absl::Status RegularFile::CheckUnchanged() const {
  struct stat info;
  if (fstat(descriptor_, &info) != 0) return CannotOpen(errno, path_);
  if (info.st_size != size_) return Changed(path_, size_, info.st_size);
  if (info.st_mtim.tv_sec != modified_.tv_sec || info.st_mtim.tv_nsec != modified_.tv_nsec) {
    return absl::InvalidArgumentError(
        absl::StrCat(QuotedPath(path_), " was written to while it was read"));
  }
  return absl::OkStatus();
}

}  // namespace espalier::formats
