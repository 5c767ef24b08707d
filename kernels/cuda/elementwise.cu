// Activations, broadcasting arithmetic and permuted axes on contiguous values: bound by memory, one element a thread.
#include <cstdint>

#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/with_float.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/transpose/transpose.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kThreads = 256;

LaunchShape ShapeFor(int64_t count) {
  const int64_t blocks = (count + kThreads - 1) / kThreads, most = 16 * MultiprocessorCount();
  return {dim3(static_cast<unsigned>(blocks < most ? blocks : most)), kThreads};
}

template <typename T>
__global__ void ActivateAll(const T* x, T* y, int64_t count, Activation activation) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    float one[1] = {ToFloat(x[i])};
    Activate<T>(one, activation);
    y[i] = FromFloat<T>(one[0]);
  }
}

// Operands of any float type, so that constants stay f32 beside bf16 activations.
__device__ float LoadFloat(const void* values, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(values)[i];
  if (dtype == DType::kBFloat16) return ToFloat(static_cast<const BFloat16*>(values)[i]);
  return ToFloat(static_cast<const Float16*>(values)[i]);
}

template <typename T>
__global__ void BinaryAll(const BinaryArgs args, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    int64_t rest = i, a_index = 0, b_index = 0;
    for (int axis = args.rank - 1; axis >= 0; --axis) {
      const int64_t at = rest % args.dims[axis];
      rest /= args.dims[axis];
      a_index += at * args.a_strides[axis];
      b_index += at * args.b_strides[axis];
    }
    const float a = LoadFloat(args.a, args.a_dtype, a_index);
    const float b = LoadFloat(args.b, args.b_dtype, b_index);
    float result = 0;
    switch (args.op) {
#define ESPALIER_BINARY_CASE(name, text, op) \
  case BinaryOp::name:                       \
    result = a op b;                         \
    break;
      ESPALIER_BINARY_OPS(ESPALIER_BINARY_CASE)
#undef ESPALIER_BINARY_CASE
    }
    static_cast<T*>(args.y)[i] = FromFloat<T>(result);
  }
}

template <typename T>
__global__ void TransposeAll(const TransposeArgs args, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    int64_t rest = i, index = 0;
    for (int axis = args.rank - 1; axis >= 0; --axis) {
      index += rest % args.dims[axis] * args.strides[axis];
      rest /= args.dims[axis];
    }
    static_cast<T*>(args.y)[i] = static_cast<const T*>(args.x)[index];
  }
}

// Product of dims, 0 when one is.
int64_t CountOf(int rank, const int64_t* dims) {
  int64_t count = 1;
  for (int axis = 0; axis < rank; ++axis) count *= dims[axis] > 0 ? dims[axis] : 0;
  return count;
}

}  // namespace

KernelStatus ActivateOnDevice(const KernelContext& ctx, const ActivateArgs& args) {
  if (args.count < 0) return {KernelCode::kInvalidArgument, "Activate: negative count"};
  if (args.count == 0) return {};
  return WithFloat(args.dtype, [&](auto tag) {
    using T = decltype(tag);
    return Launch(ctx, ShapeFor(args.count), ActivateAll<T>, static_cast<const T*>(args.x),
                  static_cast<T*>(args.y), args.count, args.activation);
  });
}

KernelStatus BinaryOnDevice(const KernelContext& ctx, const BinaryArgs& args) {
  if (args.rank < 1 || args.rank > kMaxBroadcastRank) {
    return {KernelCode::kInvalidArgument, "Binary: rank outside [1, kMaxBroadcastRank]"};
  }
  for (DType dtype : {args.a_dtype, args.b_dtype}) {
    if (!IsDeviceFloat(dtype)) return {KernelCode::kUnsupported, "Binary: needs f32, f16 or bf16"};
  }
  const int64_t count = CountOf(args.rank, args.dims);
  if (count == 0) return {};
  return WithFloat(args.y_dtype, [&](auto tag) {
    return Launch(ctx, ShapeFor(count), BinaryAll<decltype(tag)>, args, count);
  });
}

KernelStatus TransposeOnDevice(const KernelContext& ctx, const TransposeArgs& args) {
  if (args.rank < 1 || args.rank > kMaxTransposeRank) {
    return {KernelCode::kInvalidArgument, "Transpose: rank outside [1, kMaxTransposeRank]"};
  }
  const int64_t count = CountOf(args.rank, args.dims);
  if (count == 0) return {};
  const LaunchShape shape = ShapeFor(count);
  switch (args.element_bytes) {
    case 1:
      return Launch(ctx, shape, TransposeAll<uint8_t>, args, count);
    case 2:
      return Launch(ctx, shape, TransposeAll<uint16_t>, args, count);
    case 4:
      return Launch(ctx, shape, TransposeAll<uint32_t>, args, count);
    case 8:
      return Launch(ctx, shape, TransposeAll<uint64_t>, args, count);
    default:
      return {KernelCode::kInvalidArgument, "Transpose: elements are not 1, 2, 4 or 8 bytes"};
  }
}

}  // namespace espalier::kernels::cuda
