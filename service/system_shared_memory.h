// system_shared_memory.h — regions of POSIX shared memory.
//
// A region is a file under /dev/shm that the host reads by pread and writes by pwrite, never through a mapping: a
// client that truncates its file while the server reads gets an error, where a mapping would end
// the server with SIGBUS. Nothing waits: these files are memory.
//
// With a GPU the region is also mapped and pinned, for copies of the GPU alone. Those keep the pages that were pinned, so
// that a file that became shorter costs nobody but its client; when it has grown again those pages are not its own any more,
// which the page table tells, and the host reads and writes it. Pinning makes room for all of a file with holes: no more
// than kMaxPinnedBytes of all regions are, and what is not, or cannot be, goes through the host.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/tensor/devices.h"
#include "service/shared_memory_region.h"

namespace espalier::service {

class SystemSharedMemory final : public SharedMemoryRegion {
 public:
  static constexpr SharedMemoryKind kKind = SharedMemoryKind::kSystem;
  static constexpr uint64_t kMaxPinnedBytes = uint64_t{4} << 30;

  // Opens `key` ("/name" or "name"), which must hold `byte_size` bytes from `offset` on.
  // InvalidArgument for a name, key or range that cannot be meant; NotFound for a key that does not
  // exist; ResourceExhausted when the process has too many files open. `devices` outlives the region.
  static absl::StatusOr<std::shared_ptr<const SystemSharedMemory>> Open(std::string name,
                                                                        std::string key,
                                                                        uint64_t offset,
                                                                        uint64_t byte_size,
                                                                        const Devices& devices);
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
  std::byte* DeviceMemory() const override;
  // Leaves the region as it is when something is in the way.
  void Pin(const CudaDevice& device);
  // Whether the pages that were pinned are still the file's.
  bool KeepsItsPages() const;
  absl::Status Shrunk(uint64_t file_bytes) const;
  absl::Status CheckFile() const;

  const std::string key_;
  const int fd_;
  const uint64_t offset_;  // in the file
  // Of whole pages, with the region's beginning in the first; null: not pinned. Never looked at.
  std::byte* mapping_ = nullptr;
  CudaHandle pinned_;
};

}  // namespace espalier::service
