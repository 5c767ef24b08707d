// patterns.h — groups of nodes that exporters write for one op, put together again.
#pragma once

#include "engine/formats/model_graph.h"

namespace espalier::graph {

// Domain of the nodes that FusePatterns makes: ops of ours that are newer than a model's opset.
inline constexpr char kFusedDomain[] = "espalier";

// Both Gelus, as exporters spell them before opset 20, in any order and association of the products:
//   x · ½ · (1 + Erf(x / √2))      x · ½ · (1 + Tanh(√(2/π) · (x + 0.044715 · x³)))
// become a node Gelu of domain kFusedDomain. What is left without a reader is not lowered.
void FusePatterns(formats::ModelGraph& graph);

}  // namespace espalier::graph
