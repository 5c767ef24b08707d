#include "engine/planner/cost_model.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace espalier::planner {
namespace {

// Rate of a layout: `peak` multiplications per µs at many tokens, half of it at `half_tokens`.
struct Rate {
  double peak;
  double half_tokens;
};

Rate RateOf(const kernels::LinearDesc& desc) {
  const bool scalar_blocks = desc.block_rows == 1 && desc.block_cols == 1;
  switch (desc.layout) {
    case kernels::Layout::kDense:
      return {125000, 4};
    case kernels::Layout::kCsr:
      return {45000, 4};
    case kernels::Layout::kBlockCsr:
      return {90000, 4};
    case kernels::Layout::kDiagonal:
      return scalar_blocks ? Rate{75000, 4} : Rate{90000, 4};
  }
  return {1, 1};
}

constexpr double kBytesPerMicro = 50000;
constexpr double kOverheadMicros = 0.3;
// Handing tasks to other threads and waiting for them.
constexpr double kParallelMicros = 5;
// Every further thread adds this much of one: they share caches and memory.
constexpr double kThreadGain = 0.8;

}  // namespace

CostEstimate EstimateLinear(const kernels::LinearDesc& desc, int64_t stored, size_t weight_bytes,
                            int threads) {
  CostEstimate estimate;
  const double tokens = static_cast<double>(desc.tokens);
  estimate.multiplications = static_cast<double>(stored) * tokens;
  estimate.bytes = static_cast<double>(weight_bytes) +
                   tokens * static_cast<double>(desc.in + desc.out) * sizeof(float);
  const Rate rate = RateOf(desc);
  const double work =
      std::max(estimate.multiplications / (rate.peak * tokens / (tokens + rate.half_tokens)),
               estimate.bytes / kBytesPerMicro);
  const double parallel = work / (1 + kThreadGain * (threads - 1)) + kParallelMicros;
  estimate.micros = kOverheadMicros + (threads > 1 ? std::min(work, parallel) : work);
  return estimate;
}

std::string ToString(const CostEstimate& estimate) {
  return absl::StrFormat("%.3g M multiplications, %.3g MB: %.0f us", estimate.multiplications / 1e6,
                         estimate.bytes / 1e6, estimate.micros);
}

}  // namespace espalier::planner
