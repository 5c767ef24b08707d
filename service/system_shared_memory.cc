#include "service/system_shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/runtime/infer_request.h"

namespace espalier::service {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;
using runtime::Printable;

constexpr char kFolder[] = "/dev/shm";
constexpr size_t kMaxFileBytes = 255;

std::atomic<uint64_t> pinned_bytes{0};  // of all regions

uint64_t PageBytes() {
  static const auto bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// The name of a file in the folder, after the one slash that shm_open wants in front or, like glibc,
// does without. No other slash, and no way out.
absl::StatusOr<std::string> FileOf(absl::string_view key) {
  absl::string_view file = key;
  absl::ConsumePrefix(&file, "/");
  if (!file.empty() && file.size() < kMaxFileBytes && file != "." && file != ".." &&
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

SystemSharedMemory::SystemSharedMemory(std::string name, std::string key, int fd, uint64_t offset,
                                       uint64_t byte_size)
    : SharedMemoryRegion(std::move(name), byte_size),
      key_(std::move(key)),
      fd_(fd),
      offset_(offset) {}

SystemSharedMemory::~SystemSharedMemory() {
  if (mapping_ != nullptr) {
    const size_t bytes = pinned_.bytes();
    pinned_ = {};
    munmap(mapping_, bytes);
    pinned_bytes.fetch_sub(bytes, std::memory_order_relaxed);
  }
  close(fd_);
}

void SystemSharedMemory::Pin(const CudaDevice& device) {
  const uint64_t page = PageBytes();
  const uint64_t before = offset_ % page;
  if (byte_size() > kMaxPinnedBytes) return;  // sums do not overflow
  const size_t bytes = (before + byte_size() + page - 1) / page * page;
  const uint64_t together = pinned_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  void* mapping = MAP_FAILED;
  if (together <= kMaxPinnedBytes) {
    mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_,
                   static_cast<off_t>(offset_ - before));
  }
  absl::StatusOr<CudaHandle> pinned = absl::UnavailableError("not mapped");
  if (mapping != MAP_FAILED) {
    pinned = device.Pin(mapping, bytes);
    if (!pinned.ok()) munmap(mapping, bytes);
  }
  if (!pinned.ok()) {
    pinned_bytes.fetch_sub(bytes, std::memory_order_relaxed);
    return;
  }
  pinned_ = *std::move(pinned);
  mapping_ = static_cast<std::byte*>(mapping);
}

// A page that a file loses leaves every mapping of it, and nothing brings another one into ours: nobody touches it. What is
// cut off is cut off at the end, so that the last page tells; the first one, of a file that was emptied and is now as small.
bool SystemSharedMemory::KeepsItsPages() const {
  static const int page_table = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  const auto is_present = [](const std::byte* at) {
    constexpr uint64_t kPresent = uint64_t{1} << 63;
    const uint64_t page = reinterpret_cast<uintptr_t>(at) / PageBytes();
    uint64_t entry = 0;
    return pread(page_table, &entry, sizeof(entry), static_cast<off_t>(page * sizeof(entry))) ==
               sizeof(entry) &&
           (entry & kPresent) != 0;
  };
  return is_present(mapping_) && is_present(mapping_ + pinned_.bytes() - 1);
}

std::byte* SystemSharedMemory::DeviceMemory() const {
  if (mapping_ == nullptr || !CheckFile().ok() || !KeepsItsPages()) return nullptr;
  return mapping_ + offset_ % PageBytes();
}

absl::StatusOr<std::shared_ptr<const SystemSharedMemory>> SystemSharedMemory::Open(
    std::string name, std::string key, uint64_t offset, uint64_t byte_size,
    const Devices& devices) {
  if (absl::Status status = CheckNameAndSize(name, byte_size); !status.ok()) return status;
  auto path = FileOf(key);
  if (!path.ok()) return path.status();
  // Without O_NONBLOCK, a pipe of that name would hold the thread.
  const int fd = open(path->c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return OpenError(key, errno);
  // From here on the region closes the file.
  const std::shared_ptr<SystemSharedMemory> region(
      new SystemSharedMemory(std::move(name), std::move(key), fd, offset, byte_size));
  if (absl::Status status = region->CheckFile(); !status.ok()) return status;
  if (!devices.gpus.empty()) region->Pin(*devices.gpus[0]);
  return region;
}

absl::Status SystemSharedMemory::CheckFile() const {
  struct stat file = {};
  if (fstat(fd_, &file) != 0 || !S_ISREG(file.st_mode)) {
    return InvalidArgumentError(
        StrCat("shared memory '", Printable(key_), "' is not a regular file"));
  }
  const uint64_t bytes = static_cast<uint64_t>(file.st_size);
  if (offset_ > bytes || byte_size() > bytes - offset_) return Shrunk(bytes);
  return absl::OkStatus();
}

absl::Status SystemSharedMemory::Shrunk(uint64_t file_bytes) const {
  return Truncated(name(), key_, file_bytes, offset_, byte_size());
}

absl::Status SystemSharedMemory::ReadRange(uint64_t offset, absl::Span<std::byte> to) const {
  for (size_t done = 0; done < to.size();) {
    const ssize_t got =
        pread(fd_, to.data() + done, to.size() - done, static_cast<off_t>(offset_ + offset + done));
    if (got > 0) {
      done += static_cast<size_t>(got);
    } else if (got == 0) {
      return Shrunk(offset_ + offset + done);
    } else if (errno != EINTR) {
      return InvalidArgumentError(StrCat("shared memory region '", Printable(name()),
                                         "' cannot be read: ", std::strerror(errno)));
    }
  }
  return absl::OkStatus();
}

absl::Status SystemSharedMemory::WriteRange(uint64_t offset,
                                            absl::Span<const std::byte> from) const {
  // Writing behind the end would make the file longer again; a client that did not want that learns
  // of its mistake here.
  if (absl::Status status = CheckFile(); !status.ok()) return status;
  for (size_t done = 0; done < from.size();) {
    const ssize_t put = pwrite(fd_, from.data() + done, from.size() - done,
                               static_cast<off_t>(offset_ + offset + done));
    if (put > 0) {
      done += static_cast<size_t>(put);
    } else if (put == 0 || errno != EINTR) {
      return InvalidArgumentError(StrCat("shared memory region '", Printable(name()),
                                         "' cannot be written: ", std::strerror(errno)));
    }
  }
  return absl::OkStatus();
}

}  // namespace espalier::service
