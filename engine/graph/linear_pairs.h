// linear_pairs.h — pairs of linear layers that a GPU can run in one kernel, what lies between them on the chip
// (kernels/linear_pair).
#pragma once

#include <vector>

#include "engine/graph/program.h"

namespace espalier::graph {

// Program::linears of two layers, the second on what the first makes.
struct LinearPair {
  int first = -1, second = -1;
};

// In a program that PrepareForDevice has made ready, pairs of layers between which nothing else reads, the first without a
// residual: no layer is in two of them. From then on, where both bindings say `paired`, the second layer's step runs both
// and the first one's nothing; x of the first lives that long, and y does not take its memory.
std::vector<LinearPair> PairLinears(Program& program);

}  // namespace espalier::graph
