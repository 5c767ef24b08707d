// fold.h — a node whose inputs are all constants becomes a constant: it is lowered as a model of
// its own, whose first input is the node's first input, and run once. So every op can be folded, by
// the code that would run it.
#pragma once

#include "absl/status/status.h"
#include "engine/graph/lowering.h"

namespace espalier::graph {

// Folds lowering.node(). `bytes_left` is what folded constants may still take; it is reduced by the
// result.
absl::Status FoldNode(Lowering& lowering, int64_t& bytes_left);

// Lower for such a model: no batch, outputs of whatever type and shape come out. In lower.cc.
absl::StatusOr<Program> LowerUndeclared(formats::ModelGraph graph);

}  // namespace espalier::graph
