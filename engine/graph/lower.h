// lower.h — ModelGraph → Program: dead nodes dropped, constants folded, shapes inferred, steps
// fused.
//
// Errors name the file, the node and its op, and say what to do:
//   Unimplemented      an op, opset, attribute, type or form that cannot run; an op that mixes the
//                      items of a batch
//   InvalidArgument    shapes or types that contradict each other
//   ResourceExhausted  a value or a folded constant above the caps below
#pragma once

#include "absl/status/statusor.h"
#include "engine/formats/model_graph.h"
#include "engine/graph/program.h"

namespace espalier::graph {

// One value at the largest batch. A hostile shape is refused before memory is reserved.
inline constexpr int64_t kMaxValueBytes = int64_t{4} << 30;
// What folding may add, in all, to the bytes of the model's own constants.
inline constexpr int64_t kMaxFoldedBytes = int64_t{1} << 30;
// Multiplications that folding one product of constants may take: about a minute.
inline constexpr int64_t kMaxFoldedProducts = int64_t{1} << 35;

struct LowerOptions {
  // Largest batch. 0: no batch dimension; every shape is concrete.
  int64_t max_batch_size = 0;
  // Bias, residual and activation into the linear layer before them. Off only to test that fusion
  // changes nothing.
  bool fuse = true;
};

// Consumes the graph: constants move into the program or are freed.
absl::StatusOr<Program> Lower(formats::ModelGraph graph, const LowerOptions& options);

}  // namespace espalier::graph
