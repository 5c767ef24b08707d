// shared_memory_region.h — a piece of a client's memory that it registered for its tensors, whatever kind it is.
//
// Errors   InvalidArgument for a range that does not lie in the region, and for memory that turns out not to be what the
//          client said it was.
// Threads  All functions from any thread. A region stays usable by those that hold it after it was unregistered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/runtime/tensor_memory.h"

namespace espalier::service {

enum class SharedMemoryKind : uint8_t { kSystem, kCuda };

// "system", "CUDA": as Triton's messages have them.
const char* NameOf(SharedMemoryKind kind);

class SharedMemoryRegion : public runtime::TensorMemory {
 public:
  SharedMemoryRegion(const SharedMemoryRegion&) = delete;
  SharedMemoryRegion& operator=(const SharedMemoryRegion&) = delete;

  virtual SharedMemoryKind kind() const = 0;
  const std::string& name() const { return name_; }
  uint64_t byte_size() const { return byte_size_; }

  // OK if [offset, offset + bytes) lies in the region.
  absl::Status CheckRange(uint64_t offset, uint64_t bytes) const;
  absl::Status Read(uint64_t offset, absl::Span<std::byte> to) const final;
  absl::Status Write(uint64_t offset, absl::Span<const std::byte> from) const final;
  std::byte* DeviceAddress(uint64_t offset, uint64_t bytes) const final;

 protected:
  SharedMemoryRegion(std::string name, uint64_t byte_size);
  // InvalidArgument for what cannot be the name and size of a region.
  static absl::Status CheckNameAndSize(absl::string_view name, uint64_t byte_size);

 private:
  // The range lies in the region.
  virtual absl::Status ReadRange(uint64_t offset, absl::Span<std::byte> to) const = 0;
  virtual absl::Status WriteRange(uint64_t offset, absl::Span<const std::byte> from) const = 0;
  // Where copies of a GPU find the region's first byte; null: nowhere, or not any more.
  virtual std::byte* DeviceMemory() const = 0;

  const std::string name_;
  const uint64_t byte_size_;
};

}  // namespace espalier::service
