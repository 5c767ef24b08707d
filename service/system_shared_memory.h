// system_shared_memory.h — regions of POSIX shared memory.
//
// A region is a file under /dev/shm that is read by pread and written by pwrite, never mapped: a
// client that truncates its file while the server reads gets an error, where a mapping would end
// the server with SIGBUS. Nothing waits: these files are memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "service/shared_memory_region.h"

namespace espalier::service {

class SystemSharedMemory final : public SharedMemoryRegion {
 public:
  static constexpr SharedMemoryKind kKind = SharedMemoryKind::kSystem;

  // Opens `key` ("/name" or "name"), which must hold `byte_size` bytes from `offset` on.
  // InvalidArgument for a name, key or range that cannot be meant; NotFound for a key that does not
  // exist; ResourceExhausted when the process has too many files open.
  static absl::StatusOr<std::shared_ptr<const SystemSharedMemory>> Open(std::string name,
                                                                        std::string key,
                                                                        uint64_t offset,
                                                                        uint64_t byte_size);
  ~SystemSharedMemory() override;

  SharedMemoryKind kind() const override { return kKind; }
  const std::string& key() const { return key_; }
  uint64_t offset() const { return offset_; }

 private:
  SystemSharedMemory(std::string name, std::string key, int fd, uint64_t offset,
                     uint64_t byte_size);
  // InvalidArgument, also when the client has made its file shorter since.
  absl::Status ReadRange(uint64_t offset, absl::Span<std::byte> to) const override;
  absl::Status WriteRange(uint64_t offset, absl::Span<const std::byte> from) const override;
  absl::Status Shrunk(uint64_t file_bytes) const;
  absl::Status CheckFile() const;

  const std::string key_;
  const int fd_;
  const uint64_t offset_;  // in the file
};

}  // namespace espalier::service
