// fuse.h — passes that shorten a program without changing what it computes (beyond the rounding of
// what is fused).
#pragma once

#include "engine/graph/program.h"

namespace espalier::graph {

// linear → + constant row, + another value of the same shape → activation becomes one linear step with bias, residual and
// activation in its epilogue. The sums may come in any order, and the linear's value on either side; nothing else may read
// what lies between. Where the other value is computed after the linear layer, the layer moves to the sum.
void FuseLinearEpilogues(Program& program);

}  // namespace espalier::graph
