#include "engine/tensor/buffer.h"

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

void Buffer::Free::operator()(std::byte* p) const {
  if (mapped > 0) {
    // Piece by piece: a kernel without full preemption lets nobody else have the processor meanwhile.
    for (size_t begin = 0; begin < mapped; begin += kMapBytes)
      munmap(p + begin, std::min(kMapBytes, mapped - begin));
  } else {
    std::free(p);
  }
}

absl::StatusOr<Buffer> Buffer::Allocate(size_t bytes) {
  Buffer buffer;
  if (bytes == 0) return buffer;
  void* p = nullptr;
  size_t mapped = 0;
  if (bytes >= kMapBytes) {
    p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) p = nullptr;
    mapped = bytes;
  } else if (bytes <= SIZE_MAX - kAlignment) {
    p = std::aligned_alloc(kAlignment, AlignUp(bytes));
  }
  if (p == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot allocate ", bytes, " bytes of host memory"));
  }
  buffer.data_ = {static_cast<std::byte*>(p), Free{mapped}};
  buffer.size_ = bytes;
  return buffer;
}

absl::StatusOr<Buffer> Buffer::Clone() const {
  auto copy = Allocate(size_);
  if (copy.ok() && size_ > 0) std::memcpy(copy->data(), data(), size_);
  return copy;
}

}  // namespace espalier
