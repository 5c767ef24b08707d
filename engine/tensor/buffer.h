// buffer.h — owning, 64-byte aligned host memory.
//
// Memory   Large buffers (weights, arenas) are mappings of their own, which go back to the system when they are freed:
//          the allocator would keep them for later, and unloading a model would not make room for another process.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"

namespace espalier {

inline constexpr size_t kAlignment = 64;  // one cache line, one AVX-512 vector

constexpr size_t AlignUp(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Movable, not copyable; empty after a move.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept
      : data_(std::move(other.data_)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    data_ = std::move(other.data_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }
  // Uninitialised memory. ResourceExhausted, with the size, when the system has none. 0 bytes gives an empty buffer.
  static absl::StatusOr<Buffer> Allocate(size_t bytes);
  // The same bytes in memory of their own; errors as Allocate.
  absl::StatusOr<Buffer> Clone() const;

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    Free() : mapped(0) {}
    explicit Free(size_t mapped_bytes) : mapped(mapped_bytes) {}
    size_t mapped;  // bytes of the mapping; 0: from the allocator
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte[], Free> data_;
  size_t size_ = 0;
};

}  // namespace espalier
