// shared_memory.h — regions of POSIX shared memory that clients registered for their tensors.
//
// A region is a file under /dev/shm that is read by pread and written by pwrite, never mapped: a
// client that truncates its file while the server reads gets an error, where a mapping would end
// the server with SIGBUS. Whoever may register can make the server read and overwrite whatever
// shared memory the server's user may open, so regions are off unless the server was told
// otherwise.
//
// Limits   kMaxRegions, since each holds a file descriptor, and kMaxRegionBytes in all.
// Errors   Unimplemented while off; InvalidArgument for a name, key or range that cannot be meant;
//          NotFound for what does not exist; AlreadyExists; ResourceExhausted above the limits.
// Threads  All functions from any thread. A region stays usable by those that hold it after it was
//          unregistered. Nothing waits: these files are memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace espalier::service {

class SharedMemoryRegion {
 public:
  // Opens `key` ("/name" or "name"), which must hold `byte_size` bytes from `offset` on.
  static absl::StatusOr<std::shared_ptr<const SharedMemoryRegion>> Open(std::string name,
                                                                        std::string key,
                                                                        uint64_t offset,
                                                                        uint64_t byte_size);
  ~SharedMemoryRegion();
  SharedMemoryRegion(const SharedMemoryRegion&) = delete;
  SharedMemoryRegion& operator=(const SharedMemoryRegion&) = delete;

  const std::string& name() const { return name_; }
  const std::string& key() const { return key_; }
  uint64_t offset() const { return offset_; }
  uint64_t byte_size() const { return byte_size_; }

  // OK if [offset, offset + bytes) lies in the region.
  absl::Status CheckRange(uint64_t offset, uint64_t bytes) const;
  // Copies from and to `offset` in the region. InvalidArgument when the range does not lie in it, or
  // when the client has made its file shorter since.
  absl::Status Read(uint64_t offset, absl::Span<std::byte> to) const;
  absl::Status Write(uint64_t offset, absl::Span<const std::byte> from) const;

 private:
  SharedMemoryRegion(std::string name, std::string key, int fd, uint64_t offset,
                     uint64_t byte_size);
  absl::Status Shrunk(uint64_t file_bytes) const;
  absl::Status CheckFile() const;

  const std::string name_;
  const std::string key_;
  const int fd_;
  const uint64_t offset_;  // in the file
  const uint64_t byte_size_;
};

class SharedMemoryRegions {
 public:
  static constexpr size_t kMaxRegions = 1024;
  // Nothing is allocated for a region, but sums of sizes must not overflow: far above any machine.
  static constexpr uint64_t kMaxRegionBytes = uint64_t{1} << 44;

  explicit SharedMemoryRegions(bool allowed) : allowed_(allowed) {}

  bool allowed() const { return allowed_; }

  absl::Status Register(std::string name, std::string key, uint64_t offset, uint64_t byte_size);
  // Forgets a region, or all of them for an empty name. OK also for a region that is not there.
  absl::Status Unregister(absl::string_view name);
  absl::StatusOr<std::shared_ptr<const SharedMemoryRegion>> Find(absl::string_view name) const;
  // The region of this name, or all of them for an empty name, by name.
  absl::StatusOr<std::vector<std::shared_ptr<const SharedMemoryRegion>>> List(
      absl::string_view name) const;

 private:
  absl::Status CheckAllowed() const;

  const bool allowed_;
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const SharedMemoryRegion>, std::less<>> regions_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace espalier::service
