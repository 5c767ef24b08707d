#include "service/shared_memory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/runtime/infer_request.h"

namespace espalier::service {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;
using runtime::Printable;

constexpr char kFolder[] = "/dev/shm";
constexpr size_t kMaxNameBytes = 255;

absl::Status CheckName(absl::string_view name) {
  if (!name.empty() && name.size() <= kMaxNameBytes) return absl::OkStatus();
  return InvalidArgumentError(StrCat("name of a shared memory region has ", name.size(),
                                     " bytes, expected 1 to ", kMaxNameBytes));
}

// The name of a file in the folder, after the one slash that shm_open wants in front or, like glibc,
// does without. No other slash, and no way out.
absl::StatusOr<std::string> FileOf(absl::string_view key) {
  absl::string_view file = key;
  absl::ConsumePrefix(&file, "/");
  if (!file.empty() && file.size() < kMaxNameBytes && file != "." && file != ".." &&
      file.find_first_of(absl::string_view("/\0", 2)) == absl::string_view::npos) {
    return StrCat(kFolder, "/", file);
  }
  return InvalidArgumentError(StrCat("key of a shared memory region is '", Printable(key),
                                     "', expected the name of a file without '/', but for one in "
                                     "front"));
}

absl::Status OpenError(const std::string& key, int error) {
  const std::string text =
      StrCat("shared memory '", Printable(key), "' cannot be opened for reading and writing: ",
             error == ELOOP ? "it is a symbolic link" : std::strerror(error));
  if (error == ENOENT) return absl::NotFoundError(text);
  if (error == EMFILE || error == ENFILE) return absl::ResourceExhaustedError(text);
  return InvalidArgumentError(text);
}

absl::Status Truncated(absl::string_view name, absl::string_view key, uint64_t file_bytes,
                       uint64_t offset, uint64_t byte_size) {
  return InvalidArgumentError(StrCat("shared memory region '", Printable(name), "' takes ",
                                     byte_size, " bytes from offset ", offset, " of '",
                                     Printable(key), "', which has only ", file_bytes, " bytes"));
}

}  // namespace

SharedMemoryRegion::SharedMemoryRegion(std::string name, std::string key, int fd, uint64_t offset,
                                       uint64_t byte_size)
    : name_(std::move(name)),
      key_(std::move(key)),
      fd_(fd),
      offset_(offset),
      byte_size_(byte_size) {}

SharedMemoryRegion::~SharedMemoryRegion() { close(fd_); }

absl::StatusOr<std::shared_ptr<const SharedMemoryRegion>> SharedMemoryRegion::Open(
    std::string name, std::string key, uint64_t offset, uint64_t byte_size) {
  if (absl::Status status = CheckName(name); !status.ok()) return status;
  auto path = FileOf(key);
  if (!path.ok()) return path.status();
  if (byte_size == 0) {
    return InvalidArgumentError(StrCat("shared memory region '", Printable(name),
                                       "' has byte_size 0, expected at least 1"));
  }
  // Without O_NONBLOCK, a pipe of that name would hold the thread.
  const int fd = open(path->c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return OpenError(key, errno);
  // From here on the region closes the file.
  const std::shared_ptr<const SharedMemoryRegion> region(
      new SharedMemoryRegion(std::move(name), std::move(key), fd, offset, byte_size));
  if (absl::Status status = region->CheckFile(); !status.ok()) return status;
  return region;
}

absl::Status SharedMemoryRegion::CheckFile() const {
  struct stat file = {};
  if (fstat(fd_, &file) != 0 || !S_ISREG(file.st_mode)) {
    return InvalidArgumentError(
        StrCat("shared memory '", Printable(key_), "' is not a regular file"));
  }
  const uint64_t bytes = static_cast<uint64_t>(file.st_size);
  if (offset_ > bytes || byte_size_ > bytes - offset_) return Shrunk(bytes);
  return absl::OkStatus();
}

absl::Status SharedMemoryRegion::Shrunk(uint64_t file_bytes) const {
  return Truncated(name_, key_, file_bytes, offset_, byte_size_);
}

absl::Status SharedMemoryRegion::CheckRange(uint64_t offset, uint64_t bytes) const {
  if (offset <= byte_size_ && bytes <= byte_size_ - offset) return absl::OkStatus();
  return InvalidArgumentError(StrCat("shared memory region '", Printable(name_), "' has ",
                                     byte_size_, " bytes, too few for ", bytes, " bytes at offset ",
                                     offset));
}

absl::Status SharedMemoryRegion::Read(uint64_t offset, absl::Span<std::byte> to) const {
  if (absl::Status status = CheckRange(offset, to.size()); !status.ok()) return status;
  for (size_t done = 0; done < to.size();) {
    const ssize_t got =
        pread(fd_, to.data() + done, to.size() - done, static_cast<off_t>(offset_ + offset + done));
    if (got > 0) {
      done += static_cast<size_t>(got);
    } else if (got == 0) {
      return Shrunk(offset_ + offset + done);
    } else if (errno != EINTR) {
      return InvalidArgumentError(StrCat("shared memory region '", Printable(name_),
                                         "' cannot be read: ", std::strerror(errno)));
    }
  }
  return absl::OkStatus();
}

absl::Status SharedMemoryRegion::Write(uint64_t offset, absl::Span<const std::byte> from) const {
  if (absl::Status status = CheckRange(offset, from.size()); !status.ok()) return status;
  // Writing behind the end would make the file longer again; a client that did not want that learns
  // of its mistake here.
  if (absl::Status status = CheckFile(); !status.ok()) return status;
  for (size_t done = 0; done < from.size();) {
    const ssize_t put = pwrite(fd_, from.data() + done, from.size() - done,
                               static_cast<off_t>(offset_ + offset + done));
    if (put > 0) {
      done += static_cast<size_t>(put);
    } else if (put == 0 || errno != EINTR) {
      return InvalidArgumentError(StrCat("shared memory region '", Printable(name_),
                                         "' cannot be written: ", std::strerror(errno)));
    }
  }
  return absl::OkStatus();
}

absl::Status SharedMemoryRegions::CheckAllowed() const {
  if (allowed_) return absl::OkStatus();
  return absl::UnimplementedError(
      "this server takes no tensors from shared memory; --allow_system_shared_memory turns that on "
      "(for clients on the same machine that may see each other's tensors)");
}

absl::Status SharedMemoryRegions::Register(std::string name, std::string key, uint64_t offset,
                                           uint64_t byte_size) {
  if (absl::Status status = CheckAllowed(); !status.ok()) return status;
  auto region = SharedMemoryRegion::Open(std::move(name), std::move(key), offset, byte_size);
  if (!region.ok()) return region.status();
  const std::lock_guard lock(mutex_);
  if (regions_.count((*region)->name()) > 0) {
    return absl::AlreadyExistsError(StrCat("shared memory region '", Printable((*region)->name()),
                                           "' is registered already; unregister it first"));
  }
  if (regions_.size() >= kMaxRegions) {
    return absl::ResourceExhaustedError(
        StrCat(regions_.size(), " shared memory regions are registered, at most ", kMaxRegions,
               " may be; unregister what is not used"));
  }
  uint64_t total = byte_size;
  for (const auto& [other, registered] : regions_) total += registered->byte_size();
  if (total > kMaxRegionBytes) {
    return absl::ResourceExhaustedError(StrCat("shared memory regions would have ", total,
                                               " bytes together, at most ", kMaxRegionBytes,
                                               " may be registered"));
  }
  regions_.emplace((*region)->name(), *region);
  return absl::OkStatus();
}

absl::Status SharedMemoryRegions::Unregister(absl::string_view name) {
  if (absl::Status status = CheckAllowed(); !status.ok()) return status;
  const std::lock_guard lock(mutex_);
  if (name.empty()) {
    regions_.clear();
  } else if (const auto found = regions_.find(name); found != regions_.end()) {
    regions_.erase(found);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const SharedMemoryRegion>> SharedMemoryRegions::Find(
    absl::string_view name) const {
  if (absl::Status status = CheckAllowed(); !status.ok()) return status;
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(name);
  if (found != regions_.end()) return found->second;
  return absl::NotFoundError(
      StrCat("unable to find shared memory region '", Printable(name), "'; is it registered?"));
}

absl::StatusOr<std::vector<std::shared_ptr<const SharedMemoryRegion>>> SharedMemoryRegions::List(
    absl::string_view name) const {
  std::vector<std::shared_ptr<const SharedMemoryRegion>> listed;
  if (!name.empty()) {
    auto found = Find(name);
    if (!found.ok()) return found.status();
    listed.push_back(*std::move(found));
    return listed;
  }
  if (absl::Status status = CheckAllowed(); !status.ok()) return status;
  const std::lock_guard lock(mutex_);
  for (const auto& [key, region] : regions_) listed.push_back(region);
  return listed;
}

}  // namespace espalier::service
