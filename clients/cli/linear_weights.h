// linear_weights.h — the weights of a model file's linear layers (Gemm, MatMul), each as W [out, in] of y = x · Wᵀ however
// the file has it.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/formats/model_graph.h"

namespace espalier::cli {

struct LinearWeight {
  std::string name;                // of the initializer
  const Tensor* stored = nullptr;  // of the graph, which outlives this
  bool stored_transposed = false;  // the file has [in, out]

  int64_t out() const { return stored->shape()[stored_transposed ? 1 : 0]; }
  int64_t in() const { return stored->shape()[stored_transposed ? 0 : 1]; }
  // A copy as [out, in]. ResourceExhausted without memory.
  absl::StatusOr<Tensor> Matrix() const;
};

// In the order in which they are used, each once; f32, bf16 and f16.
std::vector<LinearWeight> LinearWeightsOf(const formats::ModelGraph& graph);

}  // namespace espalier::cli
