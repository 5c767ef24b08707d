#include "tests/testing/fake_ipc.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"

namespace espalier::testing {
namespace {

using kernels::KernelCode;
using kernels::KernelStatus;

constexpr KernelStatus kInvalid = {KernelCode::kLaunchFailed, "invalid argument"};
constexpr KernelStatus kUnknown = {KernelCode::kLaunchFailed, "invalid resource handle"};

// Null when the object is not there, or holds nothing. `create` makes one of `*bytes` bytes.
void* Map(const std::string& name, size_t* bytes, bool create) {
  const int fd = shm_open(name.c_str(), create ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600);
  if (fd < 0) return nullptr;
  struct stat file = {};
  if (create && ftruncate(fd, static_cast<off_t>(*bytes)) != 0) *bytes = 0;
  void* at = MAP_FAILED;
  if (fstat(fd, &file) == 0 && file.st_size > 0) {
    *bytes = static_cast<size_t>(file.st_size);
    at = mmap(nullptr, *bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  close(fd);
  return at == MAP_FAILED ? nullptr : at;
}

}  // namespace

FakeIpcHandle::FakeIpcHandle(absl::string_view object, int32_t owner, int32_t device)
    : owner(owner), device(device) {
  object.copy(name, sizeof(name) - 1);
}

std::string FakeIpcHandle::bytes() const {
  return std::string(reinterpret_cast<const char*>(this), sizeof(*this));
}

FakeIpc::~FakeIpc() {
  while (!exported_.empty()) Forget(exported_.begin()->first);
  for (const auto& [pointer, object] : mapped_) munmap(object.at, object.bytes);
}

KernelStatus FakeIpc::Export(void* memory, size_t bytes, int device, void* handle) {
  Object& object = exported_[memory];
  if (object.at == nullptr) {
    static int number = 0;
    object = {absl::StrCat("/espalier_fake_", getpid(), "_", number++), nullptr, bytes};
    object.at = Map(object.name, &object.bytes, /*create=*/true);
    if (object.at == nullptr) return {KernelCode::kOutOfMemory, "out of memory"};
    std::memcpy(object.at, memory, bytes);
  }
  const FakeIpcHandle made(object.name, getpid(), device);
  std::memcpy(handle, &made, sizeof(made));
  return {};
}

KernelStatus FakeIpc::Open(const void* handle, kernels::cuda::IpcMemory* memory) {
  FakeIpcHandle given;
  std::memcpy(&given, handle, sizeof(given));
  if (std::memcmp(given.magic, FakeIpcHandle().magic, sizeof(given.magic)) != 0) return kInvalid;
  if (given.owner == getpid()) return {KernelCode::kLaunchFailed, "invalid device context"};
  given.name[sizeof(given.name) - 1] = '\0';
  for (auto& [pointer, object] : mapped_) {
    if (object.name != given.name) continue;
    ++object.opened;
    *memory = {pointer, object.bytes, given.device};
    return {};
  }
  Object object = {given.name, nullptr, 0, 1};
  object.at = Map(object.name, &object.bytes, /*create=*/false);
  if (object.at == nullptr) return kUnknown;
  *memory = {object.at, object.bytes, given.device};
  mapped_[object.at] = object;
  return {};
}

KernelStatus FakeIpc::Close(void* pointer) {
  const auto found = mapped_.find(pointer);
  if (found == mapped_.end()) return kInvalid;
  if (--found->second.opened > 0) return {};
  munmap(found->second.at, found->second.bytes);
  mapped_.erase(found);
  return {};
}

void* FakeIpc::Place(void* pointer) const {
  auto after = exported_.upper_bound(pointer);
  if (after == exported_.begin()) return pointer;
  const auto& [memory, object] = *--after;
  const ptrdiff_t offset = static_cast<char*>(pointer) - static_cast<char*>(memory);
  return static_cast<size_t>(offset) < object.bytes ? static_cast<char*>(object.at) + offset
                                                    : pointer;
}

void FakeIpc::Forget(void* memory) {
  const auto found = exported_.find(memory);
  if (found == exported_.end()) return;
  munmap(found->second.at, found->second.bytes);
  shm_unlink(found->second.name.c_str());
  exported_.erase(found);
}

int FakeIpc::open() const {
  int count = 0;
  for (const auto& [pointer, object] : mapped_) count += object.opened;
  return count;
}

}  // namespace espalier::testing
