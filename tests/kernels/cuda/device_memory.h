// device_memory.h — device buffers and uploads through the module's table, for suites and benches. Dies on any error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "kernels/cuda/module.h"
#include "kernels/cuda/module_loader.h"

namespace espalier::kernels::testing {

inline void OrDie(const KernelStatus& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, status.message);
  std::exit(2);
}
inline void OrDie(const char* error, const char* what) {
  if (error == nullptr) return;
  std::fprintf(stderr, "%s: %s\n", what, error);
  std::exit(2);
}

// The module, on a machine whose GPU it can use; else null, and the reason on stderr.
inline const cuda::CudaModule* OpenModuleOrNull(const std::string& path) {
  std::string error;
  const cuda::CudaModule* module = cuda::OpenCudaModule(path, &error);
  int devices = 0;
  if (module == nullptr) {
    std::fprintf(stderr, "%s\n", error.c_str());
  } else {
    OrDie(module->device_count(&devices), "device count");
  }
  return module;
}

// Elements from one row to the next, as the engine lays activations out.
constexpr int64_t RowStride(int64_t width) { return (width + 63) / 64 * 64; }

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(const cuda::CudaModule* module, size_t bytes) : module_(module), bytes_(bytes) {
    OrDie(module->allocate(bytes < 16 ? 16 : bytes, &data_), "allocate");
  }
  DeviceBuffer(const cuda::CudaModule* module, const void* from, size_t bytes)
      : DeviceBuffer(module, bytes) {
    OrDie(module->copy(data_, from, bytes, nullptr), "upload");
    OrDie(module->synchronize_stream(nullptr), "upload");
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(module_, other.module_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceBuffer() {
    if (data_ != nullptr) OrDie(module_->release(data_), "release");
  }

  template <typename T = void>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

  void Fill(int byte, size_t offset = 0) {
    OrDie(module_->fill(as<char>() + offset, byte, bytes_ - offset, nullptr), "fill");
    OrDie(module_->synchronize_stream(nullptr), "fill");
  }
  // The whole of `other`, which is no larger.
  void CopyFrom(const DeviceBuffer& other) {
    OrDie(module_->copy(data_, other.data_, other.bytes_, nullptr), "copy");
    OrDie(module_->synchronize_stream(nullptr), "copy");
  }
  void Download(void* to) const {
    OrDie(module_->copy(to, data_, bytes_, nullptr), "download");
    OrDie(module_->synchronize_stream(nullptr), "download");
  }

 private:
  const cuda::CudaModule* module_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace espalier::kernels::testing
