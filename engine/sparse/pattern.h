// pattern.h — the shapes that pruning may give a weight's zeros, and magnitude pruning into them: what a weight would look
// like, before anybody has trained it.
//
//   unstructured   single elements                     diagonal(b)  whole cyclic block-diagonals; "diagonal" is b = 1
//   block(b)       whole aligned blocks, b × b         2:4          two of every four neighbours in a row of W
//
// diagonal(b) and block(b) are what the layouts diagonal(b) and block_csr(b) store (kernels/linear/weight_view.h).
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/tensor/tensor.h"

namespace espalier::sparse {

struct Pattern {
  enum class Kind : uint8_t { kUnstructured, kBlock, kDiagonal, kTwoFour };
  Kind kind = Kind::kUnstructured;
  int32_t block = 1;  // of kBlock and kDiagonal

  friend bool operator==(const Pattern&, const Pattern&) = default;
};

std::string ToString(const Pattern& pattern);
// The inverse; InvalidArgument naming what is understood. Sides in [1, kMaxBlockSide], blocks from 2.
absl::StatusOr<Pattern> ParsePattern(absl::string_view text);

// A copy of W [out, in] (f32, bf16, f16) in which only the units of the pattern with the largest sums of squares are left:
// round((1 − sparsity) · units) of them, at least one. 2:4 keeps two of four whatever the sparsity. Of equal
// units some stay, the same on every run. InvalidArgument for another type or rank, ResourceExhausted without memory for a score per unit.
absl::StatusOr<Tensor> Prune(const TensorView& weight, const Pattern& pattern, double sparsity);

// A dense weight of reproducible values in [-1, 1), none of them zero.
absl::StatusOr<Tensor> RandomWeight(DType dtype, int64_t out, int64_t in, uint64_t seed);

}  // namespace espalier::sparse
