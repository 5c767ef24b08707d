// onnx_attribute.h — AttributeProto into an Attribute.
#pragma once

#include <onnx/onnx_pb.h>

#include "absl/status/statusor.h"
#include "engine/formats/model_graph.h"
#include "engine/formats/onnx_tensor.h"

namespace espalier::formats {

// The attribute's value. InvalidArgument when its type and its fields disagree; Unimplemented for
// graphs (control flow), types, and lists of strings or tensors. Messages name the attribute.
absl::StatusOr<Attribute> ReadOnnxAttribute(const onnx::AttributeProto& proto,
                                            OnnxConstants& constants);

// The one attribute of a Constant node as a tensor: value, sparse_value, value_float(s),
// value_int(s).
absl::StatusOr<Tensor> ReadOnnxConstant(const onnx::NodeProto& node, OnnxConstants& constants);

}  // namespace espalier::formats
