#include "kernels/cuda/module.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>

#include "kernels/cuda/dense_matmul.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ops.h"

namespace espalier::kernels::cuda {
namespace {

cudaStream_t Stream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t Event(void* event) { return static_cast<cudaEvent_t>(event); }

KernelStatus DeviceCount(int* count) { return FromCuda(cudaGetDeviceCount(count)); }

KernelStatus DeviceInfo(int device, CudaDeviceInfo* info) {
  cudaDeviceProp properties;
  if (KernelStatus status = FromCuda(cudaGetDeviceProperties(&properties, device)); !status.ok())
    return status;
  *info = {};
  std::memcpy(info->name, properties.name, sizeof(info->name));
  info->name[sizeof(info->name) - 1] = '\0';
  info->compute_major = properties.major;
  info->compute_minor = properties.minor;
  info->multiprocessors = properties.multiProcessorCount;
  info->l2_bytes = properties.l2CacheSize;
  info->shared_bytes_per_block = properties.sharedMemPerBlockOptin;
  info->pci_domain = properties.pciDomainID;
  info->pci_bus = properties.pciBusID;
  info->pci_device = properties.pciDeviceID;
  cudaDriverGetVersion(&info->driver_version);
  cudaRuntimeGetVersion(&info->runtime_version);
  int previous = 0;
  cudaGetDevice(&previous);
  // Threads that wait for the device leave their CPU to others that have work: on 16 CPUs a server of ten instances answered
  // 7 to 15 % more requests than one whose threads spin, and a lone client waits no longer.
  cudaError_t error = cudaInitDevice(device, cudaDeviceScheduleYield, cudaInitDeviceFlagsAreValid);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaMemGetInfo(&info->free_bytes, &info->memory_bytes);
  cudaSetDevice(previous);
  return FromCuda(error);
}

KernelStatus UseDevice(int device) { return FromCuda(cudaSetDevice(device)); }

KernelStatus Allocate(size_t bytes, void** pointer) { return FromCuda(cudaMalloc(pointer, bytes)); }
KernelStatus Release(void* pointer) { return FromCuda(cudaFree(pointer)); }
KernelStatus AllocatePinned(size_t bytes, void** pointer) {
  return FromCuda(cudaMallocHost(pointer, bytes));
}
KernelStatus ReleasePinned(void* pointer) { return FromCuda(cudaFreeHost(pointer)); }
KernelStatus Pin(void* pointer, size_t bytes) {
  return FromCuda(cudaHostRegister(pointer, bytes, cudaHostRegisterPortable));
}
KernelStatus Unpin(void* pointer) { return FromCuda(cudaHostUnregister(pointer)); }
KernelStatus Copy(void* to, const void* from, size_t bytes, void* stream) {
  return FromCuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, Stream(stream)));
}
KernelStatus Fill(void* to, int byte, size_t bytes, void* stream) {
  return FromCuda(cudaMemsetAsync(to, byte, bytes, Stream(stream)));
}

static_assert(sizeof(cudaIpcMemHandle_t) == kIpcHandleBytes);

KernelStatus ExportIpcMemory(void* pointer, void* handle) {
  return FromCuda(cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t*>(handle), pointer));
}

// The runtime knows where a pointer lies, but only the driver how far its mapping reaches.
KernelStatus Locate(void* pointer, IpcMemory* memory) {
  using AddressRange = decltype(&cuMemGetAddressRange);
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaError_t error = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 12000,
                                                       cudaEnableDefault, &found);
  if (error != cudaSuccess) return FromCuda(error);
  if (found != cudaDriverEntryPointSuccess)
    return {KernelCode::kUnsupported, "the driver has no cuMemGetAddressRange"};
  cudaPointerAttributes attributes;
  error = cudaPointerGetAttributes(&attributes, pointer);
  if (error != cudaSuccess) return FromCuda(error);
  const auto address = reinterpret_cast<CUdeviceptr>(pointer);
  CUdeviceptr base = 0;
  size_t bytes = 0;
  if (reinterpret_cast<AddressRange>(function)(&base, &bytes, address) != CUDA_SUCCESS)
    return {KernelCode::kUnsupported, "the driver does not tell the size of the mapping"};
  *memory = {pointer, bytes - (address - base), attributes.device};
  return {};
}

KernelStatus OpenIpcMemory(const void* handle, IpcMemory* memory) {
  cudaIpcMemHandle_t opened;
  std::memcpy(&opened, handle, sizeof(opened));
  void* pointer = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&pointer, opened, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) return FromCuda(error);
  KernelStatus status = Locate(pointer, memory);
  if (!status.ok()) cudaIpcCloseMemHandle(pointer);
  return status;
}

KernelStatus CloseIpcMemory(void* pointer) { return FromCuda(cudaIpcCloseMemHandle(pointer)); }

KernelStatus CreateStream(void** stream) {
  cudaStream_t created = nullptr;
  const cudaError_t error = cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking);
  *stream = created;
  return FromCuda(error);
}
KernelStatus DestroyStream(void* stream) { return FromCuda(cudaStreamDestroy(Stream(stream))); }
KernelStatus SynchronizeStream(void* stream) {
  return FromCuda(cudaStreamSynchronize(Stream(stream)));
}
KernelStatus CreateEvent(void** event) {
  cudaEvent_t created = nullptr;
  const cudaError_t error = cudaEventCreate(&created);
  *event = created;
  return FromCuda(error);
}
KernelStatus DestroyEvent(void* event) { return FromCuda(cudaEventDestroy(Event(event))); }
KernelStatus RecordEvent(void* event, void* stream) {
  return FromCuda(cudaEventRecord(Event(event), Stream(stream)));
}
KernelStatus WaitEvent(void* stream, void* event) {
  return FromCuda(cudaStreamWaitEvent(Stream(stream), Event(event), 0));
}
KernelStatus SynchronizeEvent(void* event) { return FromCuda(cudaEventSynchronize(Event(event))); }
KernelStatus ElapsedMicros(void* begin, void* end, float* micros) {
  const cudaError_t error = cudaEventElapsedTime(micros, Event(begin), Event(end));
  *micros *= 1000;
  return FromCuda(error);
}

KernelStatus BeginCapture(void* stream) {
  return FromCuda(cudaStreamBeginCapture(Stream(stream), cudaStreamCaptureModeThreadLocal));
}
KernelStatus EndCapture(void* stream, void** graph) {
  *graph = nullptr;
  cudaGraph_t captured = nullptr;
  if (KernelStatus status = FromCuda(cudaStreamEndCapture(Stream(stream), &captured)); !status.ok())
    return status;
  cudaGraphExec_t executable = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&executable, captured, 0);
  cudaGraphDestroy(captured);
  *graph = executable;
  return FromCuda(error);
}
KernelStatus LaunchGraph(void* graph, void* stream) {
  return FromCuda(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), Stream(stream)));
}
KernelStatus DestroyGraph(void* graph) {
  return FromCuda(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)));
}

KernelStatus Settle(CudaKernel kernel, const KernelContext& ctx, const LinearArgs& args) {
  if (kernel != CudaKernel::kDenseCublasLt) return {};
  return SettleDenseMatmul(ctx, args, DenseMath::kStrict);
}

using Run = KernelStatus (*)(const KernelContext&, const LinearArgs&);

constexpr Run kLinear[] = {
#define ESPALIER_CUDA_KERNEL_ENTRY(name) Run##name,
    ESPALIER_CUDA_KERNELS(ESPALIER_CUDA_KERNEL_ENTRY)
#undef ESPALIER_CUDA_KERNEL_ENTRY
};

constexpr OpTable kOps = {
    .convert = ConvertOnDevice,
    .activate = ActivateOnDevice,
    .binary = BinaryOnDevice,
    .softmax = SoftmaxOnDevice,
    .layer_norm = LayerNormOnDevice,
    .transpose = TransposeOnDevice,
    .patch = PatchOnDevice,
    .linear_pair = LinearPairOnDevice,
};

constexpr CudaModule kModule = {
    .abi = kCudaModuleAbi,
    .linear_args_bytes = sizeof(LinearArgs),
    .build = ESPALIER_CUDA_BUILD,
    .device_count = DeviceCount,
    .device_info = DeviceInfo,
    .use_device = UseDevice,
    .allocate = Allocate,
    .release = Release,
    .allocate_pinned = AllocatePinned,
    .release_pinned = ReleasePinned,
    .pin = Pin,
    .unpin = Unpin,
    .copy = Copy,
    .fill = Fill,
    .export_ipc_memory = ExportIpcMemory,
    .open_ipc_memory = OpenIpcMemory,
    .close_ipc_memory = CloseIpcMemory,
    .create_stream = CreateStream,
    .destroy_stream = DestroyStream,
    .synchronize_stream = SynchronizeStream,
    .create_event = CreateEvent,
    .destroy_event = DestroyEvent,
    .record_event = RecordEvent,
    .wait_event = WaitEvent,
    .synchronize_event = SynchronizeEvent,
    .elapsed_micros = ElapsedMicros,
    .begin_capture = BeginCapture,
    .end_capture = EndCapture,
    .launch_graph = LaunchGraph,
    .destroy_graph = DestroyGraph,
    .linear_count = static_cast<int32_t>(CudaKernel::kCount),
    .linear = kLinear,
    .settle = Settle,
    .ops = &kOps,
};

}  // namespace
}  // namespace espalier::kernels::cuda

extern "C" __attribute__((visibility("default"))) const espalier::kernels::cuda::CudaModule*
espalier_cuda_module(uint32_t abi) {
  return abi == espalier::kernels::cuda::kCudaModuleAbi ? &espalier::kernels::cuda::kModule
                                                        : nullptr;
}
