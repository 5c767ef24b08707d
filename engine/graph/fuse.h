// fuse.h — passes that shorten a program without changing what it computes (beyond the rounding of
// a fused bias).
#pragma once

#include "engine/graph/program.h"

namespace espalier::graph {

// linear → + constant row → activation becomes one linear step with bias and activation in its
// epilogue.
void FuseLinearEpilogues(Program& program);

}  // namespace espalier::graph
