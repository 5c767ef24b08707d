// cuda_shared_memory.h — regions of memory on a GPU that another process on this machine owns and exported
// (cudaIpcGetMemHandle).
//
// What is mapped is asked of the driver, so that no client has the server read behind its memory. A model on a GPU copies
// straight from and to the region; for others a read or a write waits for a transfer to or from host memory. The owner must keep its
// memory until the region is unregistered and what uses it was answered: CUDA calls reading a freed mapping undefined,
// and an illegal access ends the server (exit code 4, as for any lost GPU).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/tensor/devices.h"
#include "service/shared_memory_region.h"

namespace espalier::service {

class CudaSharedMemory final : public SharedMemoryRegion {
 public:
  static constexpr SharedMemoryKind kKind = SharedMemoryKind::kCuda;

  // Opens the 64 bytes of a cudaIpcMemHandle_t, whose memory lies on GPU `device_id` and has at least `byte_size` bytes.
  // InvalidArgument for a name, handle, device or size that cannot be meant; Unavailable once the GPU is lost. `devices`
  // outlives the region.
  static absl::StatusOr<std::shared_ptr<const CudaSharedMemory>> Open(std::string name,
                                                                      absl::string_view raw_handle,
                                                                      int64_t device_id,
                                                                      uint64_t byte_size,
                                                                      const Devices& devices);

  SharedMemoryKind kind() const override { return kKind; }
  int device_id() const { return device_.index(); }

 private:
  CudaSharedMemory(std::string name, uint64_t byte_size, const CudaDevice& device,
                   CudaHandle memory, CudaHandle stream);
  absl::Status ReadRange(uint64_t offset, absl::Span<std::byte> to) const override;
  absl::Status WriteRange(uint64_t offset, absl::Span<const std::byte> from) const override;
  std::byte* DeviceMemory() const override { return memory_.data(); }

  const CudaDevice& device_;
  const CudaHandle memory_;
  const CudaHandle stream_;  // of the region's copies, so that they wait for no other's
};

}  // namespace espalier::service
