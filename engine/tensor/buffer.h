// buffer.h — owning, 64-byte aligned host memory.
//
// Memory   Large ones (weights, arenas) are mappings of their own, which go back to the system when they are freed: the C
//          library's allocator would keep them for later, and more of everything else that is freed after it has seen one
//          so large, and unloading a model would not make room for another process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#include "absl/status/statusor.h"

namespace espalier {

inline constexpr size_t kAlignment = 64;  // one cache line, one AVX-512 vector

constexpr size_t AlignUp(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Uninitialised memory; null when the system has none. FreeMemory wants the same size again.
void* AllocateMemory(size_t bytes);
void FreeMemory(void* memory, size_t bytes);

// The same for the elements of a std::vector; std::bad_alloc when the system has no memory.
template <typename T>
struct MemoryAllocator {
  using value_type = T;
  MemoryAllocator() = default;
  template <typename U>
  MemoryAllocator(const MemoryAllocator<U>& /*other*/) {}
  T* allocate(size_t count) {
    void* memory = count > SIZE_MAX / sizeof(T) ? nullptr : AllocateMemory(count * sizeof(T));
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t count) { FreeMemory(memory, count * sizeof(T)); }
  bool operator==(const MemoryAllocator& /*other*/) const { return true; }
};

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
    Free() : bytes(0) {}
    explicit Free(size_t allocated) : bytes(allocated) {}
    size_t bytes;
    void operator()(std::byte* p) const { FreeMemory(p, bytes); }
  };
  std::unique_ptr<std::byte[], Free> data_;
  size_t size_ = 0;
};

// Hands back to the system what was freed and the allocator keeps, in pages, for later. Takes a millisecond for every 10 MB
// or so, and threads that allocate meanwhile may wait for it.
void ReturnFreedMemory();

}  // namespace espalier
