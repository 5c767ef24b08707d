#include "engine/tensor/buffer.h"

#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace espalier {

void Buffer::Free::operator()(std::byte* p) const { std::free(p); }

absl::StatusOr<Buffer> Buffer::Allocate(size_t bytes) {
  Buffer buffer;
  if (bytes == 0) return buffer;
  void* p =
      bytes > SIZE_MAX - kAlignment ? nullptr : std::aligned_alloc(kAlignment, AlignUp(bytes));
  if (p == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot allocate ", bytes, " bytes of host memory"));
  }
  buffer.data_.reset(static_cast<std::byte*>(p));
  buffer.size_ = bytes;
  return buffer;
}

}  // namespace espalier
