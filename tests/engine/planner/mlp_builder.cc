#include "tests/engine/planner/mlp_builder.h"

#include <algorithm>
#include <random>

namespace espalier::testing {

Tensor PatternWeight(Pattern pattern, int64_t out, int64_t in, double density, uint32_t seed,
                     DType dtype) {
  constexpr int64_t kBlock = 16;
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(0, 1);
  const int64_t offsets = std::max(out, in);
  std::vector<bool> diagonals(offsets), blocks((out / kBlock + 1) * (in / kBlock + 1));
  for (size_t i = 0; i < diagonals.size(); ++i) diagonals[i] = uniform(random) < density;
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = uniform(random) < density;
  std::vector<double> values(out * in);
  for (int64_t r = 0; r < out; ++r) {
    for (int64_t c = 0; c < in; ++c) {
      bool kept = true;
      switch (pattern) {
        case Pattern::kDense:
          break;
        case Pattern::kZero:
          kept = false;
          break;
        case Pattern::kScattered:
          kept = uniform(random) < density;
          break;
        case Pattern::kBlocks:
          kept = blocks[r / kBlock * (in / kBlock + 1) + c / kBlock];
          break;
        case Pattern::kDiagonal:
          kept = diagonals[out >= in ? (r - c + offsets) % offsets : (c - r + offsets) % offsets];
          break;
      }
      if (kept) values[r * in + c] = 2 * uniform(random) - 1 + 1e-9;
    }
  }
  return MakeTensor(dtype, {out, in}, values);
}

formats::ModelGraph MakeMlp(const std::vector<int64_t>& widths, Pattern pattern, double density,
                            DType dtype) {
  formats::ModelGraph graph = MakeGraph({kBatch, widths[0]}, dtype);
  std::string last = "x";
  for (size_t i = 1; i < widths.size(); ++i) {
    const std::string n = std::to_string(i);
    const bool is_last = i + 1 == widths.size();
    graph.initializers.emplace("w" + n, PatternWeight(pattern, widths[i], widths[i - 1], density,
                                                      static_cast<uint32_t>(i), dtype));
    graph.initializers.emplace(
        "b" + n,
        MakeTensor(dtype, {widths[i]}, RandomData(widths[i], 100 + static_cast<uint32_t>(i))));
    const std::string out = is_last ? "y" : "g" + n;
    graph.nodes.push_back(
        MakeNode("Gemm", {last, "w" + n, "b" + n}, {out}, {{"transB", int64_t{1}}}));
    last = out;
    if (is_last) break;
    graph.nodes.push_back(MakeNode("Relu", {out}, {"h" + n}));
    last = "h" + n;
  }
  return graph;
}

}  // namespace espalier::testing
