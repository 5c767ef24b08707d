#include "engine/planner/cost_model.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "kernels/cuda/variants.h"

namespace espalier::planner {
namespace {

// Rate of a layout: `peak` multiplications per µs at many tokens, half of it at `half_tokens`.
struct Rate {
  double peak;
  double half_tokens;
};

// Fitted by hand to the grid of tests/bench/results/cpu/linear.json (4096 × 4096 f32, one thread of
// an AMD EPYC with AVX-512, 2026-11-30; within a factor of two nearly everywhere).
Rate RateOf(const kernels::LinearDesc& desc) {
  const bool scalar_blocks = desc.block_rows == 1 && desc.block_cols == 1;
  switch (desc.layout) {
    case kernels::Layout::kDense:
      return {126000, 8};
    case kernels::Layout::kCsr:
      return {44000, 11};
    case kernels::Layout::kBlockCsr:
      return {97000, 4};
    case kernels::Layout::kDiagonal:
      return scalar_blocks ? Rate{75000, 2.5} : Rate{95000, 4};
  }
  return {1, 1};
}

// Same run: weights from memory or a far cache, and tokens turned into lanes and back at 99 %.
constexpr double kBytesPerMicro = 50000;
constexpr double kElementsPerMicro = 2300;
constexpr double kOverheadMicros = 0.3;
// Handing tasks to other threads and waiting for them.
constexpr double kParallelMicros = 5;
// Every further thread adds this much of one: they share caches and memory.
constexpr double kThreadGain = 0.8;

// Multiplications per µs on an H200 (tests/bench/results/h200/linear.json, NOTES.md there; 2026-11-30): bf16 and f16 on
// tensor cores, f32 on CUDA cores, gathers of single elements.
double GpuRateOf(const kernels::LinearDesc& desc) {
  if (desc.weight_dtype == DType::kFloat32)
    return desc.layout == kernels::Layout::kDense ? 2.2e7 : 4e6;
  const int32_t side = std::min(desc.block_rows, desc.block_cols);
  if (desc.layout == kernels::Layout::kDense) return 3.5e8;
  if (side >= 64) return 2.5e8;
  if (side >= 32) return 1.2e8;
  if (side >= 16) return 9e7;
  return desc.layout == kernels::Layout::kDiagonal ? 9e6 : 4e6;
}

// 2:4 operands: of all elements of W, in tiles of this many tokens.
constexpr double kTwoFourRate = 5e8;
constexpr double kTwoFourTokens = 256;

// From weights in L2 or memory, small problems; launch, first bytes and the end of a kernel.
constexpr double kGpuBytesPerMicro = 3e6;
constexpr double kGpuLaunchMicros = 3;

}  // namespace

CostEstimate EstimateLinearOnGpu(const kernels::LinearDesc& desc, int64_t stored,
                                 size_t weight_bytes, const kernels::LinearVariant* variant) {
  CostEstimate estimate;
  const double tokens = static_cast<double>(desc.tokens);
  const bool is_two_four = variant != nullptr &&
                           kernels::cuda::KernelOf(*variant) == kernels::cuda::CudaKernel::kTwoFour;
  const bool gathers =
      desc.layout != kernels::Layout::kDense && desc.block_rows == 1 && !is_two_four;
  // Tensor cores work in tiles: fewer tokens take as long as one tile.
  const double tile = gathers || desc.weight_dtype == DType::kFloat32 ? 1
                      : is_two_four                                   ? kTwoFourTokens
                                                                      : 64;
  const double rate = is_two_four ? kTwoFourRate : GpuRateOf(desc);
  const int64_t multiplied = is_two_four ? desc.out * desc.in : stored;
  estimate.multiplications = static_cast<double>(multiplied) * tokens;
  estimate.bytes = static_cast<double>(weight_bytes);
  estimate.elements = tokens * static_cast<double>(desc.in + desc.out);
  estimate.micros = kGpuLaunchMicros +
                    std::max(static_cast<double>(multiplied) * std::max(tokens, tile) / rate,
                             (estimate.bytes +
                              estimate.elements * static_cast<double>(SizeOf(desc.weight_dtype))) /
                                 kGpuBytesPerMicro);
  return estimate;
}

CostEstimate EstimateLinear(const kernels::LinearDesc& desc, int64_t stored, size_t weight_bytes,
                            int threads) {
  CostEstimate estimate;
  const double tokens = static_cast<double>(desc.tokens);
  estimate.multiplications = static_cast<double>(stored) * tokens;
  estimate.bytes = static_cast<double>(weight_bytes);
  estimate.elements = tokens * static_cast<double>(desc.in + desc.out);
  const Rate rate = RateOf(desc);
  const double work =
      std::max(estimate.multiplications / (rate.peak * tokens / (tokens + rate.half_tokens)),
               estimate.bytes / kBytesPerMicro) +
      estimate.elements / kElementsPerMicro;
  const double parallel = work / (1 + kThreadGain * (threads - 1)) + kParallelMicros;
  estimate.micros = kOverheadMicros + (threads > 1 ? std::min(work, parallel) : work);
  return estimate;
}

std::string ToString(const CostEstimate& estimate) {
  return absl::StrFormat("%.3g M multiplications, %.3g MB: %.0f us", estimate.multiplications / 1e6,
                         estimate.bytes / 1e6, estimate.micros);
}

}  // namespace espalier::planner
