// mlp_builder.h — small networks with weights of chosen structure, for tests of planning.
#pragma once

#include <string>
#include <vector>

#include "tests/engine/graph/graph_harness.h"

namespace espalier::testing {

enum class Pattern { kDense, kDiagonal, kBlocks, kScattered, kZero };

// [out, in] with about `density` of the pattern's cells filled, uniform in [-1, 1).
Tensor PatternWeight(Pattern pattern, int64_t out, int64_t in, double density, uint32_t seed,
                     DType dtype = DType::kFloat32);

// x [kBatch, widths[0]] through Gemm + Relu layers of these widths (the last without Relu) to y.
formats::ModelGraph MakeMlp(const std::vector<int64_t>& widths, Pattern pattern, double density,
                            DType dtype = DType::kFloat32);

}  // namespace espalier::testing
