// cost_model.h — what a linear layer should cost, from its multiplications and the bytes it reads.
//
//   µs = overhead + (max(multiplications / rate(tokens), weight bytes / bandwidth)
//                    + elements of x and y / rate of moving them) / speedup(threads)
//   rate(tokens) = peak · tokens / (tokens + half_tokens)
//
// Good enough to drop hopeless candidates and to decide without measuring; the planner's
// measurements overrule it. Constants: cost_model.cc, with how they were measured.
#pragma once

#include <string>

#include "kernels/linear/linear.h"

namespace espalier::planner {

struct CostEstimate {
  double multiplications = 0;  // stored values · tokens
  double bytes = 0;            // weights, read once
  double elements = 0;         // of x and y, each moved once
  double micros = 0;
};

// `stored` and `weight_bytes` as in sparse::LayoutOption.
CostEstimate EstimateLinear(const kernels::LinearDesc& desc, int64_t stored, size_t weight_bytes,
                            int threads);

// The same on a GPU, where everything but the constants is one launch: µs = launch + max(multiplications / rate,
// bytes of weight, x and y / bandwidth). x and y are of the weight's type. `variant`, may be null: one that multiplies 2:4
// operands does as many multiplications as a dense one.
CostEstimate EstimateLinearOnGpu(const kernels::LinearDesc& desc, int64_t stored,
                                 size_t weight_bytes,
                                 const kernels::LinearVariant* variant = nullptr);

// "16.8 M multiplications, 67.1 MB: 1285 us".
std::string ToString(const CostEstimate& estimate);

}  // namespace espalier::planner
