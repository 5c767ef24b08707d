// tensor_memory.h — memory of a client, beside its messages, that holds tensors of its requests.
//
// The client may change it, or take it away, at any time. So the host never looks at it but through Read and Write; a
// GPU's copies may go straight to where DeviceAddress says.
//
// Errors   InvalidArgument for a range that does not lie in the memory, and for memory that is there no longer.
// Threads  All functions from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace espalier::runtime {

class TensorMemory {
 public:
  virtual ~TensorMemory() = default;

  // Copies from and to `offset`, complete on return.
  virtual absl::Status Read(uint64_t offset, absl::Span<std::byte> to) const = 0;
  virtual absl::Status Write(uint64_t offset, absl::Span<const std::byte> from) const = 0;

  // Where every GPU of this process finds [offset, offset + bytes), for copies alone; null: nowhere, or not any more. Stays
  // good while the memory is held, whatever the client does.
  virtual std::byte* DeviceAddress(uint64_t /*offset*/, uint64_t /*bytes*/) const {
    return nullptr;
  }
};

// Where in it a tensor lies.
struct TensorRange {
  std::shared_ptr<const TensorMemory> memory;  // null: the tensor is elsewhere
  uint64_t offset = 0;
  size_t bytes = 0;
};

}  // namespace espalier::runtime
