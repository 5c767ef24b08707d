#include "engine/tensor/cuda_device.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/variants.h"

namespace espalier {

using kernels::KernelCode;
using kernels::KernelStatus;
using kernels::cuda::CudaModule;

CudaHandle& CudaHandle::operator=(CudaHandle&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(handle_, other.handle_);
  std::swap(destroy_, other.destroy_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

CudaHandle::~CudaHandle() {
  if (handle_ == nullptr) return;
  // On a lost device nothing can be freed, and nobody can do anything about it.
  if (device_->Use().ok()) (void)(device_->module().*destroy_)(handle_);
}

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Open(const CudaModule& module,
                                                             Options options) {
  int count = 0;
  if (const KernelStatus status = module.device_count(&count); !status.ok() || count == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("no usable GPU: ", status.ok() ? "the driver lists none" : status.message));
  }
  if (options.index < 0 || options.index >= count) {
    return absl::FailedPreconditionError(
        absl::StrCat("there is no GPU ", options.index, ", expected 0 to ", count - 1));
  }
  std::unique_ptr<CudaDevice> device(new CudaDevice(module, std::move(options)));
  if (const KernelStatus status = module.device_info(device->index(), &device->info_);
      !status.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("GPU ", device->index(), " cannot be used: ", status.message));
  }
  const auto& info = device->info_;
  device->arch_ = kernels::cuda::ArchOf(info);
  if (device->arch_ == kernels::Arch::kCpu) {
    return absl::FailedPreconditionError(
        absl::StrCat("GPU ", device->index(), " (", info.name, ") has compute capability ",
                     info.compute_major, ".", info.compute_minor, ", expected 8.0 or newer"));
  }
  if (device->options_.portable) device->arch_ = kernels::Arch::kSm80;
  device->description_ = absl::StrCat("cuda ", info.name, ", sm_", info.compute_major,
                                      info.compute_minor, ", driver ", info.driver_version, ", ",
                                      module.build, device->options_.portable ? ", portable" : "");
  kernels::cuda::UseCudaModule(&module);
  return device;
}

kernels::KernelContext CudaDevice::MakeContext() const {
  kernels::KernelContext context;
  context.arch = arch_;
  context.ops = module_.ops;
  return context;
}

std::span<const kernels::LinearVariant> CudaDevice::linear_variants() const {
  return kernels::cuda::CudaLinearVariants();
}

bool CudaDevice::Runs(const kernels::LinearVariant& variant) const {
  return kernels::cuda::RunsOn(variant, arch_);
}

absl::Status CudaDevice::Explain(const KernelStatus& status, absl::string_view what) const {
  if (status.ok()) return absl::OkStatus();
  const std::string text =
      absl::StrCat("GPU ", index(), " (", info_.name, "): ", what, ": ", status.message);
  if (status.code == KernelCode::kOutOfMemory) return absl::ResourceExhaustedError(text);
  if (status.code != KernelCode::kLaunchFailed) return absl::InternalError(text);
  // A sticky error is what any later call returns too.
  if (module_.use_device(index()).ok() && module_.synchronize_stream(nullptr).ok()) {
    return absl::InternalError(text);
  }
  const absl::Status lost = absl::UnavailableError(
      absl::StrCat(text, "; the device is lost to this process, which has to be restarted"));
  if (!lost_.exchange(true) && options_.on_lost) options_.on_lost(lost);
  return lost;
}

absl::Status CudaDevice::Use() const { return Explain(module_.use_device(index()), "select"); }

absl::StatusOr<CudaHandle> CudaDevice::Allocate(size_t bytes) const {
  if (absl::Status status = Use(); !status.ok()) return status;
  void* memory = nullptr;
  const KernelStatus status = module_.allocate(std::max<size_t>(bytes, 256), &memory);
  if (status.ok()) return CudaHandle(this, memory, &CudaModule::release, bytes);
  kernels::cuda::CudaDeviceInfo now = {};
  const bool known = module_.device_info(index(), &now).ok();
  return Explain(status, absl::StrCat("allocate ", bytes, " bytes",
                                      known ? absl::StrCat(" (", now.free_bytes, " of ",
                                                           now.memory_bytes, " are free)")
                                            : ""));
}

absl::StatusOr<CudaHandle> CudaDevice::AllocatePinned(size_t bytes) const {
  if (absl::Status status = Use(); !status.ok()) return status;
  void* memory = nullptr;
  const KernelStatus status = module_.allocate_pinned(std::max<size_t>(bytes, 64), &memory);
  if (!status.ok()) return Explain(status, absl::StrCat("pin ", bytes, " bytes of host memory"));
  return CudaHandle(this, memory, &CudaModule::release_pinned, bytes);
}

absl::StatusOr<CudaHandle> CudaDevice::Pin(void* memory, size_t bytes) const {
  if (absl::Status status = Use(); !status.ok()) return status;
  const KernelStatus status = module_.pin(memory, bytes);
  if (!status.ok()) return Explain(status, absl::StrCat("pin ", bytes, " bytes of a mapping"));
  return CudaHandle(this, memory, &CudaModule::unpin, bytes);
}

absl::StatusOr<CudaHandle> CudaDevice::Upload(const void* from, size_t bytes) const {
  auto memory = Allocate(bytes);
  if (!memory.ok()) return memory;
  if (absl::Status status = Copy(memory->get(), from, bytes, nullptr); !status.ok()) return status;
  return memory;
}

absl::Status CudaDevice::Copy(void* to, const void* from, size_t bytes, void* stream) const {
  if (bytes == 0) return absl::OkStatus();
  if (absl::Status status = Use(); !status.ok()) return status;
  KernelStatus status = module_.copy(to, from, bytes, stream);
  if (status.ok()) status = module_.synchronize_stream(stream);
  return Explain(status, absl::StrCat("copy ", bytes, " bytes"));
}

absl::StatusOr<CudaHandle> CudaDevice::OpenIpc(absl::string_view handle) const {
  if (handle.size() != kernels::cuda::kIpcHandleBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a handle of ", handle.size(), " bytes, expected the ",
                     kernels::cuda::kIpcHandleBytes, " of a cudaIpcMemHandle_t"));
  }
  if (absl::Status status = Use(); !status.ok()) return status;
  kernels::cuda::IpcMemory memory = {};
  const KernelStatus opened = module_.open_ipc_memory(handle.data(), &memory);
  if (!opened.ok()) {
    const absl::Status status = Explain(opened, "open a handle of another process");
    if (!absl::IsInternal(status)) return status;
    // Not a bug of ours: the client's handle, or a driver that cannot tell how much is mapped.
    return opened.code == KernelCode::kUnsupported ? absl::UnimplementedError(status.message())
                                                   : absl::InvalidArgumentError(status.message());
  }
  CudaHandle owned(this, memory.pointer, &CudaModule::close_ipc_memory, memory.bytes);
  if (memory.device != index()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the handle is of memory on GPU ", memory.device, ", expected GPU ", index()));
  }
  return owned;
}

absl::StatusOr<CudaHandle> CudaDevice::NewStream() const {
  if (absl::Status status = Use(); !status.ok()) return status;
  void* stream = nullptr;
  const KernelStatus status = module_.create_stream(&stream);
  if (!status.ok()) return Explain(status, "create a stream");
  return CudaHandle(this, stream, &CudaModule::destroy_stream);
}

absl::StatusOr<CudaHandle> CudaDevice::NewEvent() const {
  if (absl::Status status = Use(); !status.ok()) return status;
  void* event = nullptr;
  const KernelStatus status = module_.create_event(&event);
  if (!status.ok()) return Explain(status, "create an event");
  return CudaHandle(this, event, &CudaModule::destroy_event);
}

absl::StatusOr<CudaHandle> CudaDevice::Capture(void* stream,
                                               const std::function<absl::Status()>& enqueue) const {
  if (absl::Status status = Explain(module_.begin_capture(stream), "begin a graph"); !status.ok())
    return status;
  const absl::Status enqueued = enqueue();
  void* graph = nullptr;
  const KernelStatus ended = module_.end_capture(stream, &graph);
  CudaHandle handle(this, graph, &CudaModule::destroy_graph);
  if (!enqueued.ok()) return enqueued;  // a failed capture says less than what made it fail
  if (!ended.ok()) return Explain(ended, "make a graph");
  return handle;
}

}  // namespace espalier
