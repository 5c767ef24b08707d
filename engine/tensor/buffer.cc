#include "engine/tensor/buffer.h"

#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace espalier {
namespace {

// From here on a mapping of its own costs little beside touching its pages.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kMapBytes = SIZE_MAX;  // AddressSanitizer watches what the allocator gives
#else
constexpr size_t kMapBytes = size_t{1} << 20;
#endif

}  // namespace

void* AllocateMemory(size_t bytes) {
  if (bytes < kMapBytes)
    return bytes > SIZE_MAX - kAlignment ? nullptr : std::aligned_alloc(kAlignment, AlignUp(bytes));
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

void FreeMemory(void* memory, size_t bytes) {
  if (bytes < kMapBytes) return std::free(memory);
  // Piece by piece: a kernel without full preemption lets nobody else have the processor meanwhile.
  for (size_t begin = 0; begin < bytes; begin += kMapBytes)
    munmap(static_cast<char*>(memory) + begin, std::min(kMapBytes, bytes - begin));
}

absl::StatusOr<Buffer> Buffer::Allocate(size_t bytes) {
  Buffer buffer;
  if (bytes == 0) return buffer;
  void* memory = AllocateMemory(bytes);
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot allocate ", bytes, " bytes of host memory"));
  }
  buffer.data_ = {static_cast<std::byte*>(memory), Free{bytes}};
  buffer.size_ = bytes;
  return buffer;
}

absl::StatusOr<Buffer> Buffer::Clone() const {
  auto copy = Allocate(size_);
  if (copy.ok() && size_ > 0) std::memcpy(copy->data(), data(), size_);
  return copy;
}

void ReturnFreedMemory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace espalier
