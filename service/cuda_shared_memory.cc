#include "service/cuda_shared_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/runtime/infer_request.h"

namespace espalier::service {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;

absl::StatusOr<const CudaDevice*> FindDevice(const Devices& devices, int64_t id) {
  for (const auto& gpu : devices.gpus) {
    if (gpu->index() == id) return gpu.get();
  }
  return InvalidArgumentError(
      StrCat("device_id is ", id, ", expected a GPU of this server: ",
             absl::StrJoin(devices.gpus, ", ", [](std::string* text, const auto& gpu) {
               absl::StrAppend(text, gpu->index());
             })));
}

}  // namespace

CudaSharedMemory::CudaSharedMemory(std::string name, uint64_t byte_size, const CudaDevice& device,
                                   CudaHandle memory, CudaHandle stream)
    : SharedMemoryRegion(std::move(name), byte_size),
      device_(device),
      memory_(std::move(memory)),
      stream_(std::move(stream)) {}

absl::StatusOr<std::shared_ptr<const CudaSharedMemory>> CudaSharedMemory::Open(
    std::string name, absl::string_view raw_handle, int64_t device_id, uint64_t byte_size,
    const Devices& devices) {
  if (absl::Status status = CheckNameAndSize(name, byte_size); !status.ok()) return status;
  const auto explain = [&](const absl::Status& status) {
    return absl::Status(status.code(), StrCat("CUDA shared memory region '",
                                              runtime::Printable(name), "': ", status.message()));
  };
  const auto device = FindDevice(devices, device_id);
  if (!device.ok()) return explain(device.status());
  auto memory = (*device)->OpenIpc(raw_handle);
  if (!memory.ok()) return explain(memory.status());
  if (byte_size > memory->bytes()) {
    return explain(InvalidArgumentError(StrCat(
        "byte_size is ", byte_size, ", but its handle maps only ", memory->bytes(), " bytes")));
  }
  auto stream = (*device)->NewStream();
  if (!stream.ok()) return explain(stream.status());
  return std::shared_ptr<const CudaSharedMemory>(new CudaSharedMemory(
      std::move(name), byte_size, **device, *std::move(memory), *std::move(stream)));
}

absl::Status CudaSharedMemory::ReadRange(uint64_t offset, absl::Span<std::byte> to) const {
  return device_.Copy(to.data(), memory_.data() + offset, to.size(), stream_.get());
}

absl::Status CudaSharedMemory::WriteRange(uint64_t offset, absl::Span<const std::byte> from) const {
  return device_.Copy(memory_.data() + offset, from.data(), from.size(), stream_.get());
}

}  // namespace espalier::service
