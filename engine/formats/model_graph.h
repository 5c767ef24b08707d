// model_graph.h — a model as read from a file: nodes, values and constants, before anything is
// optimised.
//
// Independent of the file format; readers fill it and end with FinishGraph, engine/graph lowers it.
// What every graph from a reader promises: names are unique, printable UTF-8 and at most
// kMaxNameBytes long; inputs of a node are produced before it (nodes are in topological order); the
// graph has no cycle; constants have the size that their shape says.
#pragma once

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "engine/tensor/tensor.h"

namespace espalier::formats {

// Dimensions of a tensor, as many as numpy once allowed; more are refused, so that messages can show a shape.
inline constexpr int kMaxRank = 32;

using Attribute =
    std::variant<int64_t, float, std::string, std::vector<int64_t>, std::vector<float>, Tensor>;

struct Node {
  std::string name;  // never empty: readers number anonymous nodes "<op>_<index in the file>"
  std::string op_type;
  std::string domain;                // "" is ai.onnx
  std::vector<std::string> inputs;   // "" is an omitted optional input
  std::vector<std::string> outputs;  // "" is an omitted optional output; at least one is named
  std::map<std::string, Attribute> attributes;
};

// A graph input or output. A symbolic or absent first dimension is kBatch, all others are positive.
struct ValueInfo {
  std::string name;
  DType dtype = DType::kFloat32;
  Shape shape;
};

struct ModelGraph {
  std::string source;  // file it was read from, for messages
  int64_t opset = 0;   // of ai.onnx
  // Without those that are initializers.
  std::vector<ValueInfo> inputs;
  // At least one. An output may also name an initializer or an input.
  std::vector<ValueInfo> outputs;
  // All dense: sparse ones are expanded by the reader.
  absl::flat_hash_map<std::string, Tensor> initializers;
  std::vector<Node> nodes;
};

// "node 'fc1' (Gemm)", for messages.
std::string Describe(const Node& node);

// Checks the promises above (all but the sizes of constants) and sorts the nodes. A file that has
// them in order keeps its order; one that has not is sorted rather than refused, as other runtimes
// do, because graph editors write such files and the sort costs nothing. InvalidArgument names
// nodes and values.
absl::Status FinishGraph(ModelGraph& graph);

}  // namespace espalier::formats
