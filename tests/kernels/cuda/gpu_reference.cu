#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "tests/kernels/cuda/gpu_reference.h"

namespace espalier::kernels::testing {
namespace {

__device__ double Load(const void* array, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(array)[i];
  if (dtype == DType::kBFloat16)
    return __bfloat162float(static_cast<const __nv_bfloat16*>(array)[i]);
  return __half2float(static_cast<const __half*>(array)[i]);
}

__device__ double Activated(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < 0 ? 0.0 : x;
    case Activation::kGeluErf:
      return x / 2 * erfc(-x / sqrt(2.0));
    case Activation::kGeluTanh:
      return x / 2 * (1 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
    case Activation::kSigmoid:
      return 1 / (1 + exp(-x));
    case Activation::kTanh:
      return tanh(x);
  }
  return x;
}

struct Sum {
  double value = 0, magnitude = 0;
  __device__ void Add(double product) {
    value += product;
    magnitude += fabs(product);
  }
};

// One row of one block times the token's columns.
__device__ void AddBlockRow(const LinearArgs& args, int64_t token, int64_t block, int64_t block_col,
                            int64_t row_in_block, Sum& sum) {
  const WeightView& w = args.weight;
  const int64_t first = block_col * w.block_cols;
  for (int64_t c = 0; c < w.block_cols && first + c < w.in; ++c) {
    sum.Add(Load(w.values, w.dtype, (block * w.block_rows + row_in_block) * w.block_cols + c) *
            Load(args.x, args.io_dtype, token * args.x_stride + first + c));
  }
}

__global__ void ReferenceKernel(LinearArgs args, const int64_t* tokens, int64_t count,
                                double* expected, double* magnitude) {
  const WeightView& w = args.weight;
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count * w.out) return;
  const int64_t token = tokens[i / w.out], row = i % w.out;
  const int64_t R = (w.out + w.block_rows - 1) / w.block_rows,
                C = (w.in + w.block_cols - 1) / w.block_cols;
  const int64_t D = R < C ? R : C;
  const int64_t block_row = row / w.block_rows, in_block = row % w.block_rows;
  Sum sum;
  switch (w.layout) {
    case Layout::kDense:
      for (int64_t c = 0; c < w.in; ++c) {
        sum.Add(Load(w.values, w.dtype, row * w.in + c) *
                Load(args.x, args.io_dtype, token * args.x_stride + c));
      }
      break;
    case Layout::kCsr:
    case Layout::kBlockCsr:
      for (int64_t j = w.row_ptr[block_row]; j < w.row_ptr[block_row + 1]; ++j) {
        AddBlockRow(args, token, j, w.col_idx[j], in_block, sum);
      }
      break;
    case Layout::kDiagonal:
      for (int64_t k = 0; k < w.count; ++k) {
        const int64_t offset = w.offsets[k];
        const int64_t t = R >= C ? (block_row - offset + R) % R : block_row;
        if (t >= D) continue;
        AddBlockRow(args, token, k * D + t, R >= C ? t : (t + offset) % C, in_block, sum);
      }
      break;
  }
  const double bias = args.bias == nullptr ? 0.0 : args.bias[row];
  const double residual = args.residual == nullptr ? 0.0
                                                   : Load(args.residual, args.io_dtype,
                                                          token * args.residual_stride + row);
  expected[i] = Activated(args.activation, sum.value + bias + residual);
  magnitude[i] = sum.magnitude + fabs(bias) + fabs(residual);
}

__global__ void FillKernel(void* to, DType dtype, int64_t count, uint64_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t z = seed * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(i) * 0xd1342543de82ef95;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    const float value = static_cast<float>((z ^ (z >> 31)) >> 40) * 0x1p-23f - 1.0f;
    if (dtype == DType::kFloat32) static_cast<float*>(to)[i] = value;
    if (dtype == DType::kBFloat16) static_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16_rn(value);
    if (dtype == DType::kFloat16) static_cast<__half*>(to)[i] = __float2half_rn(value);
  }
}

__global__ void CountNanKernel(const void* y, DType dtype, int64_t tokens, int64_t out,
                               int64_t stride, unsigned long long* found) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < tokens * out;
       i += int64_t{gridDim.x} * blockDim.x) {
    if (isnan(Load(y, dtype, i / out * stride + i % out))) atomicAdd(found, 1ull);
  }
}

const char* Finish() {
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* GpuReferenceLinear(const LinearArgs& args, const int64_t* tokens, int64_t count,
                               double* expected, double* magnitude) {
  if (count == 0) return nullptr;
  const auto blocks = static_cast<unsigned>((count * args.weight.out + 255) / 256);
  ReferenceKernel<<<blocks, 256>>>(args, tokens, count, expected, magnitude);
  return Finish();
}

const char* GpuFillRandom(void* to, DType dtype, int64_t count, uint64_t seed) {
  if (count == 0) return nullptr;
  FillKernel<<<2048, 256>>>(to, dtype, count, seed);
  return Finish();
}

const char* GpuCountNan(const void* y, DType dtype, int64_t tokens, int64_t out, int64_t stride,
                        int64_t* found) {
  unsigned long long* counter = nullptr;
  unsigned long long value = 0;
  if (const cudaError_t error = cudaMalloc(&counter, sizeof(*counter)); error != cudaSuccess) {
    return cudaGetErrorString(error);
  }
  cudaMemset(counter, 0, sizeof(*counter));
  if (tokens > 0) CountNanKernel<<<2048, 256>>>(y, dtype, tokens, out, stride, counter);
  const char* error = Finish();
  cudaMemcpy(&value, counter, sizeof(value), cudaMemcpyDeviceToHost);
  cudaFree(counter);
  *found = static_cast<int64_t>(value);
  return error;
}

}  // namespace espalier::kernels::testing
