#include "kernels/cuda/launch.h"

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "kernels/linear/check_args.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kMaxDevices = 64;

int CurrentDevice() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && device < kMaxDevices ? device : 0;
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled FindEncodeTiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                       cudaEnableDefault, &result) != cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    return nullptr;
  }
  return reinterpret_cast<EncodeTiled>(function);
}

bool IsMultipleOf16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

KernelStatus FromCuda(cudaError_t error) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // clears what is not sticky, so that it does not surface at the next check
  const KernelCode code =
      error == cudaErrorMemoryAllocation ? KernelCode::kOutOfMemory : KernelCode::kLaunchFailed;
  return {code, cudaGetErrorString(error)};  // static storage in the runtime
}

int MultiprocessorCount() {
  static std::array<std::atomic<int>, kMaxDevices> counts{};
  const int device = CurrentDevice();
  int count = counts[device].load(std::memory_order_relaxed);
  if (count == 0) {
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
      count = 1;
    counts[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

KernelStatus ActiveClusters(const void* kernel, int cluster, int threads, size_t shared_bytes,
                            int* count) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int, size_t>, int> known;
  if (KernelStatus status = AllowSharedMemory(kernel, shared_bytes); !status.ok()) return status;
  const std::lock_guard<std::mutex> lock(mutex);
  int& active = known[{kernel, CurrentDevice(), cluster, shared_bytes}];
  if (active == 0) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(cluster);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&active, kernel, &config);
    if (error != cudaSuccess) return FromCuda(error);
    if (active < 1)
      return {KernelCode::kUnsupported, "the device has no room for a cluster of this kernel"};
  }
  *count = active;
  return {};
}

KernelStatus AllowSharedMemory(const void* kernel, size_t bytes) {
  if (bytes <= 48 * 1024) return {};
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> allowed;
  const std::lock_guard<std::mutex> lock(mutex);
  size_t& limit = allowed[{kernel, CurrentDevice()}];
  if (limit >= bytes) return {};
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return FromCuda(error);
  limit = bytes;
  return {};
}

KernelStatus MakeTensorMap(CUtensorMap* map, DType dtype, const void* base, int64_t rows,
                           int64_t columns, int64_t row_stride, int box_rows, int box_columns) {
  static const EncodeTiled encode = FindEncodeTiled();
  if (encode == nullptr)
    return {KernelCode::kUnsupported, "the driver has no cuTensorMapEncodeTiled"};
  const CUtensorMapDataType type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUtensorMapSwizzle swizzle = box_columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box_columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                         : CU_TENSOR_MAP_SWIZZLE_32B;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_stride) * 2};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns),
                             static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(map, type, 2, const_cast<void*>(base), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    return {KernelCode::kInvalidArgument, "the driver refused the tensor map of x"};
  return {};
}

KernelStatus CheckArgs(const LinearArgs& args) {
  if (args.tokens < 0 || args.tokens > INT32_MAX - 1024) {
    return {KernelCode::kInvalidArgument, "linear: tokens must be in [0, 2^31 - 1024]"};
  }
  if (args.tokens == 0) return {};
  if (args.x == nullptr || args.y == nullptr || args.weight.packed == nullptr) {
    return {KernelCode::kInvalidArgument, "linear: x, y and packed weights must not be null"};
  }
  if (args.x_stride < args.weight.in || args.y_stride < args.weight.out) {
    return {KernelCode::kInvalidArgument, "linear: a row stride is below the width"};
  }
  if (const char* wrong = WrongResidual(args); wrong != nullptr)
    return {KernelCode::kInvalidArgument, wrong};
  if (args.x_stride % 8 != 0 || args.y_stride % 8 != 0 || !IsMultipleOf16(args.x) ||
      !IsMultipleOf16(args.y) || !IsMultipleOf16(args.weight.packed) ||
      !IsMultipleOf16(args.residual) || args.residual_stride % 8 != 0) {
    return {KernelCode::kInvalidArgument, "linear: CUDA kernels need 16-byte aligned rows"};
  }
  return {};
}

}  // namespace espalier::kernels::cuda
