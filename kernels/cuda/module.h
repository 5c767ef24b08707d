// module.h — the C boundary of libespalier_cuda.so: everything the engine may ask of a GPU, as one table of functions.
//
// The engine is built without CUDA and opens the module with dlopen where a driver is present (module_loader.h).
// `espalier_cuda_module(kCudaModuleAbi)` returns the table, or null when the module was built for another ABI number.
// Structs cross the boundary by pointer or by value in the C++ ABI of one toolchain: a module serves the build it came
// with. Raise the number with any change to this file, to kernels.h, to op_table.h or to the structs they pass.
//
// Errors   Every function returns a KernelStatus; texts are static. An error that the driver calls sticky (an illegal
//          access, a lost device) is returned by every later call too: the process has to be restarted.
// Async    Functions with a `stream` enqueue and return. Streams, events and graphs are cudaStream_t, cudaEvent_t and
//          cudaGraphExec_t; null is the default stream.
// Threads  Thread-safe; `use_device` is per thread, as in CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/kernel_context.h"
#include "kernels/base/kernel_status.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/op_table.h"
#include "kernels/linear/linear.h"

namespace espalier::kernels::cuda {

constexpr uint32_t kCudaModuleAbi = 10;

// Of a handle by which one process lets another map its device memory (cudaIpcMemHandle_t).
constexpr size_t kIpcHandleBytes = 64;

struct CudaDeviceInfo {
  char name[256];
  int32_t compute_major, compute_minor;
  int32_t multiprocessors;
  int32_t driver_version, runtime_version;  // 13000: CUDA 13.0
  size_t memory_bytes, free_bytes;
  size_t l2_bytes;
  size_t shared_bytes_per_block;  // the most a block may ask for
  int32_t pci_domain, pci_bus, pci_device;
};

// Device memory of another process, mapped into this one.
struct IpcMemory {
  void* pointer;
  size_t bytes;    // mapped from `pointer` on, by the driver's account
  int32_t device;  // where they lie
};

struct CudaModule {
  uint32_t abi;
  uint32_t linear_args_bytes;  // sizeof(LinearArgs) as the module was built
  const char* build;           // "CUDA 13.0"

  KernelStatus (*device_count)(int* count);
  KernelStatus (*device_info)(int device, CudaDeviceInfo* info);
  KernelStatus (*use_device)(int device);

  KernelStatus (*allocate)(size_t bytes, void** pointer);
  KernelStatus (*release)(void* pointer);
  KernelStatus (*allocate_pinned)(size_t bytes, void** pointer);
  KernelStatus (*release_pinned)(void* pointer);
  // Pins memory of this process that is there already (whole pages), so that every device copies from and to it by itself. The
  // pages stay until they are unpinned, even if they are those of a file that somebody makes shorter.
  KernelStatus (*pin)(void* pointer, size_t bytes);
  KernelStatus (*unpin)(void* pointer);
  // Between any two of host, pinned and device memory; asynchronous when the host side is pinned.
  KernelStatus (*copy)(void* to, const void* from, size_t bytes, void* stream);
  KernelStatus (*fill)(void* to, int byte, size_t bytes, void* stream);

  // Handles are kIpcHandleBytes long. What is exported comes from `allocate`, and stays until nobody has it open: reading a
  // mapping of freed memory is undefined, and may cost the reader its device. A handle is opened on the current device, in
  // another process than its owner's (there the driver refuses it). Opening it again gives the same pointer; every opening
  // needs its closing.
  KernelStatus (*export_ipc_memory)(void* pointer, void* handle);
  KernelStatus (*open_ipc_memory)(const void* handle, IpcMemory* memory);
  KernelStatus (*close_ipc_memory)(void* pointer);

  KernelStatus (*create_stream)(void** stream);
  KernelStatus (*destroy_stream)(void* stream);
  KernelStatus (*synchronize_stream)(void* stream);
  KernelStatus (*create_event)(void** event);
  KernelStatus (*destroy_event)(void* event);
  KernelStatus (*record_event)(void* event, void* stream);
  KernelStatus (*wait_event)(void* stream,
                             void* event);  // later work of `stream` waits for the event
  KernelStatus (*synchronize_event)(void* event);
  KernelStatus (*elapsed_micros)(void* begin, void* end, float* micros);

  // What this thread enqueues on `stream` between the two calls becomes a graph instead of running.
  KernelStatus (*begin_capture)(void* stream);
  KernelStatus (*end_capture)(void* stream, void** graph);
  KernelStatus (*launch_graph)(void* graph, void* stream);
  KernelStatus (*destroy_graph)(void* graph);

  // linear[k] runs CudaKernel k.
  int32_t linear_count;
  KernelStatus (*const* linear)(const KernelContext& ctx, const LinearArgs& args);
  // Lets a library kernel choose its algorithm by timing this problem on these buffers (y is overwritten). Call it before
  // a capture; a no-op for kernels of this module.
  KernelStatus (*settle)(CudaKernel kernel, const KernelContext& ctx, const LinearArgs& args);

  const OpTable* ops;  // for KernelContext::ops
};

}  // namespace espalier::kernels::cuda

extern "C" const espalier::kernels::cuda::CudaModule* espalier_cuda_module(uint32_t abi);
