// model_graph.h — a model as read from a file: nodes, values and constants, before anything is optimised.
//
// Independent of the file format; readers fill it, engine/graph lowers it. Everything in it was checked by the reader:
// names are unique, inputs of a node are produced before it (nodes are in topological order), the graph has no cycle,
// constants have the size that their shape says.
#pragma once

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/tensor/tensor.h"

namespace espalier::formats {

using Attribute = std::variant<int64_t, float, std::string, std::vector<int64_t>, std::vector<float>, Tensor>;

struct Node {
  std::string name;  // never empty: the reader numbers anonymous nodes "<op>_<index>"
  std::string op_type;
  std::string domain;  // "" is ai.onnx
  std::vector<std::string> inputs;  // "" is an omitted optional input
  std::vector<std::string> outputs;
  std::map<std::string, Attribute> attributes;
};

// A graph input or output. A symbolic or absent first dimension is kBatch.
struct ValueInfo {
  std::string name;
  DType dtype = DType::kFloat32;
  Shape shape;
};

struct ModelGraph {
  std::string source;  // file it was read from, for messages
  int64_t opset = 0;   // of ai.onnx
  std::vector<ValueInfo> inputs;  // without those that are initializers
  std::vector<ValueInfo> outputs;
  absl::flat_hash_map<std::string, Tensor> initializers;  // dense; sparse ones are expanded by the reader
  std::vector<Node> nodes;
};

}  // namespace espalier::formats
