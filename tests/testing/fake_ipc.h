// fake_ipc.h — memory of the fake device that two processes share: what is behind a handle is an object of POSIX shared
// memory, which takes the place of the allocation from its export on.
//
// A test, in any language, makes a handle of an object of its own: FakeIpcHandle with its name. As the driver, the fake
// refuses a handle of its own process, and counts how often one is open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "absl/strings/string_view.h"
#include "kernels/cuda/module.h"

namespace espalier::testing {

struct FakeIpcHandle {
  char magic[8] = {'f', 'a', 'k', 'e', 'i', 'p', 'c', '\0'};
  int32_t owner = 0;   // process
  int32_t device = 0;  // where the memory lies
  char name[48] = {};  // of the object, with the slash in front

  FakeIpcHandle() = default;
  FakeIpcHandle(absl::string_view object, int32_t owner, int32_t device = 0);
  // As RPCs carry it.
  std::string bytes() const;
};
static_assert(sizeof(FakeIpcHandle) == kernels::cuda::kIpcHandleBytes);

class FakeIpc {
 public:
  FakeIpc() = default;
  ~FakeIpc();
  FakeIpc(const FakeIpc&) = delete;
  FakeIpc& operator=(const FakeIpc&) = delete;

  // `memory` is an allocation of `bytes` bytes on `device`.
  kernels::KernelStatus Export(void* memory, size_t bytes, int device, void* handle);
  kernels::KernelStatus Open(const void* handle, kernels::cuda::IpcMemory* memory);
  kernels::KernelStatus Close(void* pointer);
  // Where the bytes at `pointer` are: in the object when they belong to an allocation that was exported.
  void* Place(void* pointer) const;
  // The allocation is freed.
  void Forget(void* memory);

  int open() const;  // openings that wait for their closing

 private:
  struct Object {
    std::string name;
    void* at = nullptr;
    size_t bytes = 0;
    int opened = 0;
  };
  std::map<void*, Object> exported_;  // by allocation
  std::map<void*, Object> mapped_;    // by pointer
};

}  // namespace espalier::testing
