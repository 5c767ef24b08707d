// Softmax and LayerNorm: a thread block walks a row; columns of an inner axis get a thread each.
#include <cstdint>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/with_float.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/layer_norm/layer_norm.h"
#include "kernels/softmax/softmax.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kThreads = 256;

struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Maximum {
  static constexpr float kNeutral = -__builtin_inff();
  // NaN wins, so that a row with one is NaN as the formula says.
  __device__ float operator()(float a, float b) const { return a > b || a != a ? a : b; }
};

// The same value in every thread of the block, combined in a fixed order.
template <typename Op>
__device__ float ReduceBlock(float value, Op op) {
  __shared__ float partial[kThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2)
    value = op(value, __shfl_xor_sync(0xffffffffu, value, distance));
  __syncthreads();  // readers of the last reduction are done
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  value = partial[0];
  for (int warp = 1; warp < kThreads / 32; ++warp) value = op(value, partial[warp]);
  return value;
}

// A block a row.
template <typename T>
__global__ void SoftmaxRows(const T* x, T* y, int64_t rows, int64_t n) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* from = x + row * n;
    T* to = y + row * n;
    float top = Maximum::kNeutral, sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += kThreads) top = Maximum()(top, ToFloat(from[i]));
    top = ReduceBlock(top, Maximum());
    for (int64_t i = threadIdx.x; i < n; i += kThreads) sum += expf(ToFloat(from[i]) - top);
    sum = ReduceBlock(sum, Sum());
    for (int64_t i = threadIdx.x; i < n; i += kThreads)
      to[i] = FromFloat<T>(expf(ToFloat(from[i]) - top) / sum);
  }
}

// A thread a column of an [n, inner] slice.
template <typename T>
__global__ void SoftmaxColumns(const T* x, T* y, int64_t outer, int64_t n, int64_t inner) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t c = int64_t{blockIdx.x} * kThreads + threadIdx.x; c < outer * inner; c += step) {
    const int64_t first = c / inner * n * inner + c % inner;
    float top = Maximum::kNeutral, sum = 0;
    for (int64_t i = 0; i < n; ++i) top = Maximum()(top, ToFloat(x[first + i * inner]));
    for (int64_t i = 0; i < n; ++i) sum += expf(ToFloat(x[first + i * inner]) - top);
    for (int64_t i = 0; i < n; ++i)
      y[first + i * inner] = FromFloat<T>(expf(ToFloat(x[first + i * inner]) - top) / sum);
  }
}

template <typename T>
__global__ void LayerNormRows(const LayerNormArgs args) {
  const float count = static_cast<float>(args.n);
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const T* from = static_cast<const T*>(args.x) + row * args.n;
    T* to = static_cast<T*>(args.y) + row * args.n;
    float sum = 0, squares = 0;
    for (int64_t i = threadIdx.x; i < args.n; i += kThreads) sum += ToFloat(from[i]);
    const float mean = ReduceBlock(sum, Sum()) / count;
    for (int64_t i = threadIdx.x; i < args.n; i += kThreads) {
      const float centred = ToFloat(from[i]) - mean;
      squares += centred * centred;
    }
    const float inverse = 1.0f / sqrtf(ReduceBlock(squares, Sum()) / count + args.epsilon);
    for (int64_t i = threadIdx.x; i < args.n; i += kThreads) {
      const float scaled = (ToFloat(from[i]) - mean) * inverse * args.scale[i];
      to[i] = FromFloat<T>(args.bias != nullptr ? scaled + args.bias[i] : scaled);
    }
  }
}

LaunchShape Blocks(int64_t wanted) {
  const int64_t most = 16 * MultiprocessorCount();
  return {dim3(static_cast<unsigned>(wanted < most ? wanted : most)), kThreads};
}

}  // namespace

KernelStatus SoftmaxOnDevice(const KernelContext& ctx, const SoftmaxArgs& args) {
  if (args.outer < 0 || args.n < 1 || args.inner < 0) {
    return {KernelCode::kInvalidArgument, "Softmax: outer or inner below 0, or n below 1"};
  }
  if (args.outer == 0 || args.inner == 0) return {};
  return WithFloat(args.dtype, [&](auto tag) {
    using T = decltype(tag);
    const T* x = static_cast<const T*>(args.x);
    T* y = static_cast<T*>(args.y);
    if (args.inner == 1)
      return Launch(ctx, Blocks(args.outer), SoftmaxRows<T>, x, y, args.outer, args.n);
    const int64_t columns = args.outer * args.inner;
    return Launch(ctx, Blocks((columns + kThreads - 1) / kThreads), SoftmaxColumns<T>, x, y,
                  args.outer, args.n, args.inner);
  });
}

KernelStatus LayerNormOnDevice(const KernelContext& ctx, const LayerNormArgs& args) {
  if (args.rows < 0 || args.n < 1)
    return {KernelCode::kInvalidArgument, "LayerNorm: rows below 0 or n below 1"};
  if (args.rows == 0) return {};
  return WithFloat(args.dtype, [&](auto tag) {
    return Launch(ctx, Blocks(args.rows), LayerNormRows<decltype(tag)>, args);
  });
}

}  // namespace espalier::kernels::cuda
