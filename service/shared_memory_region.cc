#include "service/shared_memory_region.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/runtime/infer_request.h"

namespace espalier::service {

using absl::InvalidArgumentError;
using absl::StrCat;
using runtime::Printable;

const char* NameOf(SharedMemoryKind kind) {
  return kind == SharedMemoryKind::kSystem ? "system" : "CUDA";
}

SharedMemoryRegion::SharedMemoryRegion(std::string name, uint64_t byte_size)
    : name_(std::move(name)), byte_size_(byte_size) {}

absl::Status SharedMemoryRegion::CheckNameAndSize(absl::string_view name, uint64_t byte_size) {
  constexpr size_t kMaxNameBytes = 255;
  if (name.empty() || name.size() > kMaxNameBytes) {
    return InvalidArgumentError(StrCat("name of a shared memory region has ", name.size(),
                                       " bytes, expected 1 to ", kMaxNameBytes));
  }
  if (byte_size > 0) return absl::OkStatus();
  return InvalidArgumentError(
      StrCat("shared memory region '", Printable(name), "' has byte_size 0, expected at least 1"));
}

absl::Status SharedMemoryRegion::CheckRange(uint64_t offset, uint64_t bytes) const {
  if (offset <= byte_size_ && bytes <= byte_size_ - offset) return absl::OkStatus();
  return InvalidArgumentError(StrCat("shared memory region '", Printable(name_), "' has ",
                                     byte_size_, " bytes, too few for ", bytes, " bytes at offset ",
                                     offset));
}

absl::Status SharedMemoryRegion::Read(uint64_t offset, absl::Span<std::byte> to) const {
  absl::Status status = CheckRange(offset, to.size());
  return status.ok() ? ReadRange(offset, to) : status;
}

absl::Status SharedMemoryRegion::Write(uint64_t offset, absl::Span<const std::byte> from) const {
  absl::Status status = CheckRange(offset, from.size());
  return status.ok() ? WriteRange(offset, from) : status;
}

std::byte* SharedMemoryRegion::DeviceAddress(uint64_t offset, uint64_t bytes) const {
  std::byte* const memory = CheckRange(offset, bytes).ok() ? DeviceMemory() : nullptr;
  return memory == nullptr ? nullptr : memory + offset;
}

}  // namespace espalier::service
