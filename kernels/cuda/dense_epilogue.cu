#include "kernels/cuda/dense_epilogue.h"

#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/launch.cuh"

namespace espalier::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void ConvertBiasKernel(const float* bias, T* to, int64_t out) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < out) to[i] = FromFloat<T>(bias[i]);
}

// Thread blocks walk tokens; threads walk outputs.
template <typename T>
__global__ void ActivateKernel(T* y, int64_t y_stride, int64_t tokens, int64_t out,
                               Activation activation) {
  for (int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    for (int64_t column = threadIdx.x; column < out; column += kThreads) {
      float one[1] = {ToFloat(y[token * y_stride + column])};
      Activate<T>(one, activation);
      y[token * y_stride + column] = FromFloat<T>(one[0]);
    }
  }
}

template <typename T>
KernelStatus ConvertTyped(const KernelContext& ctx, const LinearArgs& args, void* to) {
  const int64_t out = args.weight.out;
  return Launch(ctx, {dim3(static_cast<unsigned>((out + kThreads - 1) / kThreads)), kThreads},
                ConvertBiasKernel<T>, args.bias, static_cast<T*>(to), out);
}

template <typename T>
KernelStatus ActivateTyped(const KernelContext& ctx, const LinearArgs& args) {
  const int64_t most = 8 * MultiprocessorCount();
  const int64_t blocks = args.tokens < most ? args.tokens : most;
  return Launch(ctx, {dim3(static_cast<unsigned>(blocks)), kThreads}, ActivateKernel<T>,
                static_cast<T*>(args.y), args.y_stride, args.tokens, args.weight.out,
                args.activation);
}

}  // namespace

KernelStatus ConvertBias(const KernelContext& ctx, const LinearArgs& args, void* to) {
  switch (args.io_dtype) {
    case DType::kFloat32:
      return ConvertTyped<float>(ctx, args, to);
    case DType::kBFloat16:
      return ConvertTyped<BFloat16>(ctx, args, to);
    default:
      return ConvertTyped<Float16>(ctx, args, to);
  }
}

KernelStatus ActivateInPlace(const KernelContext& ctx, const LinearArgs& args) {
  switch (args.io_dtype) {
    case DType::kFloat32:
      return ActivateTyped<float>(ctx, args);
    case DType::kBFloat16:
      return ActivateTyped<BFloat16>(ctx, args);
    default:
      return ActivateTyped<Float16>(ctx, args);
  }
}

}  // namespace espalier::kernels::cuda
