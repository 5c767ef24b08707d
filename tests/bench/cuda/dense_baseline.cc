#include "tests/bench/cuda/dense_baseline.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cuda/dense_image.h"
#include "tests/kernels/cuda/device_weight.h"
#include "tests/kernels/cuda/gpu_reference.h"

namespace espalier::bench {
namespace {

using kernels::testing::DeviceBuffer;
using kernels::testing::GpuFillRandom;
using kernels::testing::OrDie;

constexpr int kMaxCopies = 20, kNodes = 20, kNodesOfLong = 2, kSamples = 4;
constexpr double kLongFlops = 1e11;  // 2 ms at 50 TFLOP/s

int64_t RowStride(int64_t width) { return (width + 63) / 64 * 64; }

struct Copy {
  DeviceBuffer weight, x, y;
};

DeviceBuffer Random(const kernels::cuda::CudaModule* module, int64_t elements, uint64_t seed) {
  DeviceBuffer buffer(module, elements * sizeof(float));
  OrDie(GpuFillRandom(buffer.as(), DType::kFloat32, elements, seed), "fill dense f32");
  return buffer;
}

}  // namespace

Timing TimeDense32(const kernels::cuda::CudaModule* module, void* stream, int64_t tokens,
                   int64_t out, int64_t in, size_t least_bytes, kernels::cuda::DenseMath math,
                   double seconds) {
  kernels::LinearArgs args;
  args.io_dtype = args.weight.dtype = DType::kFloat32;
  args.weight.layout = kernels::Layout::kDense;
  args.weight.out = out;
  args.weight.in = in;
  args.weight.count = out * in;
  args.tokens = tokens;
  args.x_stride = RowStride(in);
  args.y_stride = RowStride(out);
  const int64_t weight_elements = out * kernels::cuda::DenseRowStride(in);
  const auto touched = static_cast<double>(
      (weight_elements + tokens * (args.x_stride + args.y_stride)) * sizeof(float));
  const int count =
      least_bytes == 0
          ? 1
          : std::clamp(static_cast<int>(std::ceil(static_cast<double>(least_bytes) / touched)), 2,
                       kMaxCopies);
  std::vector<Copy> copies;
  for (int i = 0; i < count; ++i) {
    copies.push_back({Random(module, weight_elements, 100 + i),
                      Random(module, tokens * args.x_stride, 1 + i),
                      DeviceBuffer(module, tokens * args.y_stride * sizeof(float))});
  }
  const DeviceBuffer scratch(module, kernels::cuda::DenseScratchBytes(
                                         kernels::testing::DescOfWeight(args.weight, tokens)));
  args.scratch = scratch.as();
  const auto at = [&](int i) {
    args.weight.packed = copies[i % count].weight.as();
    args.x = copies[i % count].x.as();
    args.y = copies[i % count].y.as();
    return args;
  };
  kernels::KernelContext context;
  OrDie(SettleDenseMatmul(context, at(0), math), "settle dense f32");
  context.stream = stream;
  const double flops =
      2.0 * static_cast<double>(tokens) * static_cast<double>(out) * static_cast<double>(in);
  const TimedGraph graph(
      module, stream, flops > kLongFlops ? kNodesOfLong : kNodes,
      [&](void*, int i) { return DenseMatmul(context, at(i), math); }, "dense f32");
  return TimeInTurn(module, {&graph}, kSamples, seconds)[0];
}

}  // namespace espalier::bench
