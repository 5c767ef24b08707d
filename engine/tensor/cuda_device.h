// cuda_device.h — one GPU, behind the table of functions of the CUDA module (kernels/cuda/module.h). No CUDA header: the
// same code runs over a table whose "device" is host memory, which is how it is tested without a GPU.
//
// Memory   Allocations are the driver's own and made at load only; every failure says how much was asked and free.
// Errors   ResourceExhausted without memory; Unavailable once the device is lost (a sticky CUDA error: an illegal access,
//          a device that fell off the bus). Every later call fails then, so the process has to be restarted: `on_lost` is
//          told once, from the thread that noticed.
// Threads  Thread-safe. CUDA's current device belongs to a thread: every function here sets it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/tensor/device.h"
#include "kernels/cuda/module.h"

namespace espalier {

// Owns one thing of the module: device memory, pinned host memory, a stream, an event or a graph. Movable, null after a
// move. The device outlives it.
class CudaHandle {
 public:
  using Destroy = kernels::KernelStatus (*kernels::cuda::CudaModule::*)(void*);

  CudaHandle() = default;
  CudaHandle(const CudaDevice* device, void* handle, Destroy destroy, size_t bytes = 0)
      : device_(device), handle_(handle), destroy_(destroy), bytes_(bytes) {}
  CudaHandle(CudaHandle&& other) noexcept { *this = std::move(other); }
  CudaHandle& operator=(CudaHandle&& other) noexcept;
  ~CudaHandle();

  void* get() const { return handle_; }
  std::byte* data() const { return static_cast<std::byte*>(handle_); }
  size_t bytes() const { return bytes_; }  // of memory

 private:
  const CudaDevice* device_ = nullptr;
  void* handle_ = nullptr;
  Destroy destroy_ = nullptr;
  size_t bytes_ = 0;
};

class CudaDevice final : public Device {
 public:
  struct Options {
    int index = 0;
    // Only kernels that every GPU since sm_80 runs: how the portable path is tested on a newer one.
    bool portable = false;
    std::function<void(const absl::Status&)> on_lost;  // may be empty
  };

  // FailedPrecondition for an index that is not there or a GPU that is too old. The module outlives the device.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Open(const kernels::cuda::CudaModule& module,
                                                          Options options);

  // "cuda NVIDIA H200, sm_90, driver 13000, CUDA 13.0": without the index, for equal GPUs have equal timings.
  std::string Description() const override { return description_; }
  int threads() const override { return 1; }
  kernels::KernelContext MakeContext() const override;
  std::span<const kernels::LinearVariant> linear_variants() const override;
  bool Runs(const kernels::LinearVariant& variant) const override;
  const CudaDevice* AsCudaOrNull() const override { return this; }

  int index() const { return options_.index; }
  const kernels::cuda::CudaDeviceInfo& info() const { return info_; }
  const kernels::cuda::CudaModule& module() const { return module_; }
  bool lost() const { return lost_.load(std::memory_order_relaxed); }

  // Explains a status of the module; `what` says what was being done.
  absl::Status Explain(const kernels::KernelStatus& status, absl::string_view what) const;
  // Makes this the device of the calling thread.
  absl::Status Use() const;

  // 256-byte aligned; 0 bytes give a small allocation. Contents undefined.
  absl::StatusOr<CudaHandle> Allocate(size_t bytes) const;
  absl::StatusOr<CudaHandle> AllocatePinned(size_t bytes) const;
  // Pins [memory, memory + bytes), which begins a page, until the handle goes: every device then copies from and to it by
  // itself. Internal when the driver cannot.
  absl::StatusOr<CudaHandle> Pin(void* memory, size_t bytes) const;
  // A copy of host memory on the device, complete when this returns.
  absl::StatusOr<CudaHandle> Upload(const void* from, size_t bytes) const;
  // The same of memory on the device.
  absl::StatusOr<CudaHandle> CopyOf(const CudaHandle& memory) const {
    return Upload(memory.get(), memory.bytes());
  }
  // Between host and device memory, complete when this returns; `stream` is one of this device, or null. Whoever enqueued
  // something else on the stream waits for that too.
  absl::Status Copy(void* to, const void* from, size_t bytes, void* stream) const;
  // The memory behind a handle that another process exported (see module.h); its bytes() are all that is mapped.
  // InvalidArgument, with the driver's words, for what cannot be opened here, and for memory of another GPU.
  absl::StatusOr<CudaHandle> OpenIpc(absl::string_view handle) const;
  absl::StatusOr<CudaHandle> NewStream() const;
  absl::StatusOr<CudaHandle> NewEvent() const;
  // What `enqueue` puts on `stream`, as a graph.
  absl::StatusOr<CudaHandle> Capture(void* stream,
                                     const std::function<absl::Status()>& enqueue) const;

  // Held while library kernels choose their algorithms and graphs are captured from the choice.
  std::mutex& setup_mutex() const { return setup_mutex_; }

 private:
  CudaDevice(const kernels::cuda::CudaModule& module, Options options)
      : module_(module), options_(std::move(options)) {}

  const kernels::cuda::CudaModule& module_;
  const Options options_;
  kernels::cuda::CudaDeviceInfo info_ = {};
  kernels::Arch arch_ = kernels::Arch::kCpu;
  std::string description_;
  mutable std::mutex setup_mutex_;
  mutable std::atomic<bool> lost_ = false;
};

}  // namespace espalier
