// dense_baseline.h — the dense product of a layer's shape in 32 bits, for rows whose own type is narrower.
#pragma once

#include <cstdint>

#include "kernels/cuda/dense_matmul.h"
#include "tests/bench/cuda/graph_timer.h"

namespace espalier::bench {

// y = x · Wᵀ in f32 by the best of cuBLASLt's heuristics, in `math`. `least_bytes` as in LayerStack: 0 stays on one copy of
// W, x and y (warm). Long products are replayed from graphs of two. Dies on any error.
Timing TimeDense32(const kernels::cuda::CudaModule* module, void* stream, int64_t tokens,
                   int64_t out, int64_t in, size_t least_bytes, kernels::cuda::DenseMath math,
                   double seconds);

}  // namespace espalier::bench
