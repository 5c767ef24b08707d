// transpose.h — axes permuted (Transpose, and the transA of a Gemm).
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "engine/graph/lowering.h"

namespace espalier::graph {

// Emits x with axis i of the result being axis perm[i] of x. Refuses to move the batch dimension.
absl::StatusOr<Operand> EmitTranspose(Lowering& lowering, const Operand& x,
                                      const std::vector<int64_t>& perm);

// The transpose of a matrix in memory.
absl::StatusOr<Tensor> TransposedMatrix(const Tensor& matrix);

}  // namespace espalier::graph
