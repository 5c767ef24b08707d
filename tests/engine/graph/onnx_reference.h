// onnx_reference.h — the oracle for models: every op as the ONNX definition writes it, in double,
// element by element. Shares no code with the engine beyond Tensor and the reader's structs.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "engine/formats/model_graph.h"

namespace espalier::testing {

struct Values {
  Shape shape;
  std::vector<double> data;
};

// Evaluates `graph` for these inputs and returns the named outputs. Aborts on what it does not
// know: it runs on models made by tests.
std::map<std::string, Values> EvaluateReference(const formats::ModelGraph& graph,
                                                std::map<std::string, Values> inputs);

// Elements of a tensor as doubles.
Values ToValues(const TensorView& tensor);

// --- building models in tests ---
Tensor MakeTensor(DType dtype, const Shape& shape, const std::vector<double>& data);
// Attributes without tensors, which cannot be copied into a list.
using Attributes =
    std::map<std::string,
             std::variant<int64_t, float, std::string, std::vector<int64_t>, std::vector<float>>>;
formats::Node MakeNode(const std::string& op, std::vector<std::string> inputs,
                       std::vector<std::string> outputs, const Attributes& attributes = {});
// A graph of opset 21 with f32 input "x" of shape [kBatch, item...] and output "y" of unknown
// shape.
formats::ModelGraph MakeGraph(const Shape& input_shape, DType dtype = DType::kFloat32);
// Uniform in [-1, 1), from a seed.
std::vector<double> RandomData(int64_t count, uint32_t seed);

}  // namespace espalier::testing
