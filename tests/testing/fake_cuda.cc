#include "tests/testing/fake_cuda.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/element_patch/element_patch.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/layer_norm/layer_norm.h"
#include "kernels/linear_pair/linear_pair.h"
#include "kernels/softmax/softmax.h"
#include "kernels/transpose/transpose.h"
#include "tests/testing/fake_cuda_ops.h"

namespace espalier::testing {
namespace {

using kernels::KernelCode;
using kernels::KernelContext;
using kernels::KernelStatus;
using kernels::LinearArgs;
using kernels::cuda::CudaDeviceInfo;
using kernels::cuda::CudaKernel;
using kernels::cuda::CudaModule;
using kernels::cuda::OpTable;

using Work = std::function<KernelStatus()>;

struct Stream {
  bool capturing = false;
  std::vector<Work> captured;
  double micros = 0;
  // The linear layer that ran last, to compute runs of one and the same only once.
  CudaKernel last_kernel = CudaKernel::kCount;
  LinearArgs last_args;
};
struct Graph {
  std::vector<Work> work;
};
struct Event {
  double micros = 0;
};

std::unique_ptr<FakeCuda> device = std::make_unique<FakeCuda>();
Stream default_stream;
std::recursive_mutex mutex;  // over everything that changes

Stream& StreamOf(void* stream) {
  return stream == nullptr ? default_stream : *static_cast<Stream*>(stream);
}

KernelStatus Alive() {
  const std::lock_guard lock(mutex);
  if (device->broken.empty()) return {};
  return {KernelCode::kLaunchFailed, device->broken.c_str()};
}

KernelStatus Enqueue(void* stream, Work work) {
  const std::lock_guard lock(mutex);
  if (KernelStatus status = Alive(); !status.ok()) return status;
  Stream& to = StreamOf(stream);
  if (!to.capturing) return work();
  to.captured.push_back(std::move(work));
  return {};
}

template <typename T>
KernelStatus Make(void** handle) {
  const std::lock_guard lock(mutex);
  if (KernelStatus status = Alive(); !status.ok()) return status;
  *handle = new T();
  ++device->live_handles;
  return {};
}

template <typename T>
KernelStatus Delete(void* handle) {
  const std::lock_guard lock(mutex);
  delete static_cast<T*>(handle);
  --device->live_handles;
  return Alive();
}

KernelStatus DeviceCount(int* count) {
  *count = device->devices;
  return Alive();
}

KernelStatus DeviceInfo(int, CudaDeviceInfo* info) {
  const std::lock_guard lock(mutex);
  *info = {};
  std::snprintf(info->name, sizeof(info->name), "Fake GPU");
  info->compute_major = device->compute_major;
  info->compute_minor = device->compute_minor;
  info->driver_version = 13000;
  info->multiprocessors = 2;
  info->memory_bytes = device->memory_bytes;
  info->free_bytes = device->memory_bytes - device->allocated_bytes();
  return Alive();
}

thread_local int current_device = 0;

KernelStatus UseDevice(int index) {
  current_device = index;
  return Alive();
}

KernelStatus Allocate(size_t bytes, void** pointer) {
  const std::lock_guard lock(mutex);
  if (KernelStatus status = Alive(); !status.ok()) return status;
  if (bytes > device->memory_bytes - device->allocated_bytes())
    return {KernelCode::kOutOfMemory, "out of memory"};
  *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*pointer, 0xff, bytes);  // what nobody wrote is NaN
  device->allocations[*pointer] = bytes;
  return {};
}

KernelStatus Release(void* pointer) {
  const std::lock_guard lock(mutex);
  device->ipc.Forget(pointer);
  device->allocations.erase(pointer);
  std::free(pointer);
  return Alive();
}

KernelStatus AllocatePinned(size_t bytes, void** pointer) {
  const std::lock_guard lock(mutex);
  if (KernelStatus status = Alive(); !status.ok()) return status;
  *pointer = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  ++device->live_handles;
  return {};
}

KernelStatus ReleasePinned(void* pointer) {
  const std::lock_guard lock(mutex);
  std::free(pointer);
  --device->live_handles;
  return Alive();
}

// Brings the first and the last page into the mapping, as the driver does with all.
KernelStatus Pin(void* pointer, size_t bytes) {
  const std::lock_guard lock(mutex);
  if (KernelStatus status = Alive(); !status.ok()) return status;
  if (device->pins_fail) return {KernelCode::kLaunchFailed, "invalid argument"};
  const auto* at = static_cast<const volatile char*>(pointer);
  (void)at[0];
  (void)at[bytes - 1];
  ++device->live_handles;
  return {};
}

KernelStatus Unpin(void*) {
  const std::lock_guard lock(mutex);
  --device->live_handles;
  return Alive();
}

KernelStatus Copy(void* to, const void* from, size_t bytes, void* stream) {
  return Enqueue(stream, [=] {
    std::memcpy(device->ipc.Place(to), device->ipc.Place(const_cast<void*>(from)), bytes);
    return KernelStatus();
  });
}

KernelStatus Fill(void* to, int byte, size_t bytes, void* stream) {
  return Enqueue(stream, [=] {
    std::memset(to, byte, bytes);
    return KernelStatus();
  });
}

KernelStatus ExportIpcMemory(void* pointer, void* handle) {
  const std::lock_guard lock(mutex);
  if (KernelStatus status = Alive(); !status.ok()) return status;
  const auto found = device->allocations.find(pointer);
  if (found == device->allocations.end()) return {KernelCode::kLaunchFailed, "invalid argument"};
  return device->ipc.Export(pointer, found->second, current_device, handle);
}

KernelStatus OpenIpcMemory(const void* handle, kernels::cuda::IpcMemory* memory) {
  const std::lock_guard lock(mutex);
  if (KernelStatus status = Alive(); !status.ok()) return status;
  return device->ipc.Open(handle, memory);
}

KernelStatus CloseIpcMemory(void* pointer) {
  const std::lock_guard lock(mutex);
  return device->ipc.Close(pointer);
}

KernelStatus SynchronizeStream(void*) { return Alive(); }
KernelStatus RecordEvent(void* event, void* stream) {
  static_cast<Event*>(event)->micros = StreamOf(stream).micros;
  return Alive();
}
KernelStatus WaitEvent(void*, void*) { return Alive(); }
KernelStatus SynchronizeEvent(void*) { return Alive(); }
KernelStatus ElapsedMicros(void* begin, void* end, float* micros) {
  *micros =
      static_cast<float>(static_cast<Event*>(end)->micros - static_cast<Event*>(begin)->micros);
  return Alive();
}

KernelStatus BeginCapture(void* stream) {
  const std::lock_guard lock(mutex);
  if (KernelStatus status = Alive(); !status.ok()) return status;
  StreamOf(stream).capturing = true;
  ++device->captures;
  return {};
}

KernelStatus EndCapture(void* stream, void** graph) {
  const std::lock_guard lock(mutex);
  Stream& from = StreamOf(stream);
  from.capturing = false;
  if (KernelStatus status = Alive(); !status.ok()) return status;
  *graph = new Graph{std::exchange(from.captured, {})};
  ++device->live_handles;
  return {};
}

KernelStatus LaunchGraph(void* graph, void* stream) {
  const std::lock_guard lock(mutex);
  ++device->launches_of[current_device];
  if (++device->launches > device->breaks_after_launches && device->breaks_after_launches >= 0) {
    device->broken = "an illegal memory access was encountered";
  }
  StreamOf(stream).last_kernel = CudaKernel::kCount;  // inputs may have changed
  for (const Work& work : static_cast<Graph*>(graph)->work) {
    if (KernelStatus status = Alive(); !status.ok()) return status;
    if (KernelStatus status = work(); !status.ok()) return status;
  }
  return Alive();
}

template <int kKernel>
KernelStatus Linear(const KernelContext& ctx, const LinearArgs& args) {
  constexpr auto kernel = static_cast<CudaKernel>(kKernel);
  LinearArgs none = args;  // a kernel refuses when it is launched, not when the graph runs
  none.tokens = 0;
  if (KernelStatus status = FakeLinear(kernel, none); !status.ok()) return status;
  return Enqueue(ctx.stream, [kernel, args, stream = ctx.stream] {
    ++device->runs[kernel];
    Stream& on = StreamOf(stream);
    on.micros += device->micros ? device->micros(kernel, args) : 1.0;
    const bool again =
        on.last_kernel == kernel && std::memcmp(&on.last_args, &args, sizeof(args)) == 0;
    on.last_kernel = kernel;
    on.last_args = args;
    return again ? KernelStatus() : FakeLinear(kernel, args);
  });
}

// Both layers, with the time of one launch less than they take apart.
KernelStatus LinearPair(const KernelContext& ctx, const kernels::LinearPairArgs& args) {
  constexpr CudaKernel kAsKernel = CudaKernel::kBlockSlabFull;
  return Enqueue(ctx.stream, [args, stream = ctx.stream] {
    ++device->pair_runs;
    const int64_t stride = (args.first.weight.out + 7) / 8 * 8;
    std::vector<uint16_t> between(args.first.tokens * stride);
    LinearArgs first = args.first, second = args.second;
    first.y = between.data(), first.y_stride = stride;
    second.x = between.data(), second.x_stride = stride;
    Stream& on = StreamOf(stream);
    if (device->micros)
      on.micros += device->micros(kAsKernel, first) + device->micros(kAsKernel, second) - 1;
    const KernelStatus status = FakeLinear(kAsKernel, first);
    return status.ok() ? FakeLinear(kAsKernel, second) : status;
  });
}

template <size_t... kIndices>
constexpr auto LinearTable(std::index_sequence<kIndices...>) {
  using Run = KernelStatus (*)(const KernelContext&, const LinearArgs&);
  return std::array<Run, sizeof...(kIndices)>{Linear<static_cast<int>(kIndices)>...};
}
constexpr auto kLinear =
    LinearTable(std::make_index_sequence<static_cast<size_t>(CudaKernel::kCount)>());

KernelStatus Settle(CudaKernel, const KernelContext&, const LinearArgs&) {
  const std::lock_guard lock(mutex);
  ++device->settles;
  return Alive();
}

template <typename Args, KernelStatus (*kRun)(const Args&)>
KernelStatus Op(const KernelContext& ctx, const Args& args) {
  return Enqueue(ctx.stream, [args] { return kRun(args); });
}

constexpr OpTable kOps = {
    .convert = Op<kernels::cuda::ConvertArgs, FakeConvert>,
    .activate = Op<kernels::ActivateArgs, FakeActivate>,
    .binary = Op<kernels::BinaryArgs, FakeBinary>,
    .softmax = Op<kernels::SoftmaxArgs, FakeSoftmax>,
    .layer_norm = Op<kernels::LayerNormArgs, FakeLayerNorm>,
    .transpose = Op<kernels::TransposeArgs, FakeTranspose>,
    .patch = Op<kernels::PatchArgs, FakePatch>,
    .linear_pair = LinearPair,
};

constexpr CudaModule kModule = {
    .abi = kernels::cuda::kCudaModuleAbi,
    .linear_args_bytes = sizeof(LinearArgs),
    .build = "fake CUDA",
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
    .create_stream = Make<Stream>,
    .destroy_stream = Delete<Stream>,
    .synchronize_stream = SynchronizeStream,
    .create_event = Make<Event>,
    .destroy_event = Delete<Event>,
    .record_event = RecordEvent,
    .wait_event = WaitEvent,
    .synchronize_event = SynchronizeEvent,
    .elapsed_micros = ElapsedMicros,
    .begin_capture = BeginCapture,
    .end_capture = EndCapture,
    .launch_graph = LaunchGraph,
    .destroy_graph = Delete<Graph>,
    .linear_count = static_cast<int32_t>(CudaKernel::kCount),
    .linear = kLinear.data(),
    .settle = Settle,
    .ops = &kOps,
};

}  // namespace

size_t FakeCuda::allocated_bytes() const {
  size_t bytes = 0;
  for (const auto& [pointer, size] : allocations) bytes += size;
  return bytes;
}

FakeCuda& FakeCuda::Reset() {
  device = std::make_unique<FakeCuda>();
  default_stream = Stream();
  return *device;
}

FakeCuda& FakeCuda::Get() { return *device; }
const CudaModule& FakeCuda::Module() { return kModule; }

double ProportionalMicros(CudaKernel, const LinearArgs& args) {
  const double values = static_cast<double>(args.weight.count) * args.weight.block_rows *
                        args.weight.block_cols *
                        (args.weight.layout == kernels::Layout::kDiagonal
                             ? static_cast<double>(args.weight.diagonal_length())
                             : 1.0);
  return 1 + values * static_cast<double>(args.tokens) / 1e6;
}

}  // namespace espalier::testing
