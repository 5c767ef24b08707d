// onnx_graph.h — GraphProto into a ModelGraph: values, constants, nodes with their attributes.
#pragma once

#include <onnx/onnx_pb.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "engine/formats/model_graph.h"
#include "engine/formats/onnx_tensor.h"
#include "engine/formats/reader.h"

namespace espalier::formats {

// "" and "ai.onnx" are the same domain.
inline bool IsOnnxDomain(absl::string_view domain) { return domain.empty() || domain == "ai.onnx"; }

// Fills inputs, outputs, initializers and nodes, in the order of the file; FinishGraph checks how
// they hang together. Constants leave `proto` as they are decoded, so that a model is not held
// twice.
absl::Status ReadOnnxGraph(onnx::GraphProto& proto, OnnxConstants& constants,
                           const ReadLimits& limits, ModelGraph& graph);

}  // namespace espalier::formats
