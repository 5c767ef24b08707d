#include "engine/formats/onnx_graph.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"
#include "engine/formats/onnx_attribute.h"

namespace espalier::formats {
namespace {

absl::Status Annotated(absl::string_view what, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(what, ": ", status.message()));
}

// ---- values

const char* KindOf(const onnx::TypeProto& type) {
  switch (type.value_case()) {
    case onnx::TypeProto::kSequenceType:
      return "a sequence";
    case onnx::TypeProto::kMapType:
      return "a map";
    case onnx::TypeProto::kOptionalType:
      return "an optional value";
    case onnx::TypeProto::kSparseTensorType:
      return "a sparse tensor";
    default:
      return "an opaque value";
  }
}

absl::StatusOr<int64_t> Dimension(const onnx::TensorShapeProto::Dimension& dim, int axis) {
  // -1 instead of a name is not in the standard, but converters have written it for a batch.
  const bool symbolic = !dim.has_dim_value() || (axis == 0 && dim.dim_value() == kBatch);
  if (symbolic && axis == 0) return kBatch;
  if (symbolic) {
    return absl::UnimplementedError(
        absl::StrCat("dimension ", axis, " is symbolic (", Quoted(dim.dim_param()),
                     "), only the first may be: export the model with a fixed size"));
  }
  if (dim.dim_value() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("dimension ", axis, " is ", dim.dim_value(), ", expected a positive number"));
  }
  if (dim.dim_value() == 0) {
    return absl::UnimplementedError(
        absl::StrCat("dimension ", axis, " is 0: tensors without elements are not served"));
  }
  return dim.dim_value();
}

absl::StatusOr<ValueInfo> Value(const onnx::ValueInfoProto& proto, const ReadLimits& limits) {
  const onnx::TypeProto& type = proto.type();
  if (type.value_case() == onnx::TypeProto::VALUE_NOT_SET)
    return absl::InvalidArgumentError("has no type");
  if (!type.has_tensor_type()) {
    return absl::UnimplementedError(
        absl::StrCat("is ", KindOf(type), ", only tensors are supported"));
  }
  const auto element = OnnxElementTypeOf(type.tensor_type().elem_type());
  if (!element.ok()) return element.status();
  if (!type.tensor_type().has_shape()) {
    return absl::UnimplementedError("has no shape: run shape inference before the export");
  }
  ValueInfo value{proto.name(), element->dtype, {}};
  const auto& dims = type.tensor_type().shape().dim();
  if (dims.size() > kMaxRank) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", dims.size(), " dimensions, expected at most ", kMaxRank));
  }
  for (int axis = 0; axis < dims.size(); ++axis) {
    const auto dim = Dimension(dims[axis], axis);
    if (!dim.ok()) return dim.status();
    value.shape.push_back(*dim);
  }
  const bool batched = !value.shape.empty() && value.shape[0] == kBatch;
  const auto elements = CheckedElementCount(absl::MakeConstSpan(value.shape).subspan(batched));
  if (!elements.ok()) return elements.status();
  const auto size = static_cast<int64_t>(SizeOf(value.dtype));
  if (*elements > limits.max_tensor_bytes / size) {
    return absl::ResourceExhaustedError(
        absl::StrCat("has the shape ", ToString(value.shape), " of ", NameOf(value.dtype),
                     ", the limit for one tensor is ", limits.max_tensor_bytes, " bytes"));
  }
  return value;
}

absl::Status ReadValues(const onnx::GraphProto& proto, const ReadLimits& limits,
                        ModelGraph& graph) {
  absl::flat_hash_set<absl::string_view> constants, inputs;
  for (const auto& tensor : proto.initializer()) constants.insert(tensor.name());
  for (const auto& tensor : proto.sparse_initializer()) constants.insert(tensor.values().name());
  for (const auto& input : proto.input()) {
    const std::string what = absl::StrCat("input ", Quoted(input.name()));
    if (!inputs.insert(input.name()).second)
      return absl::InvalidArgumentError(absl::StrCat(what, " is listed twice"));
    if (constants.contains(input.name())) continue;
    auto value = Value(input, limits);
    if (!value.ok()) return Annotated(what, value.status());
    graph.inputs.push_back(*std::move(value));
  }
  for (const auto& output : proto.output()) {
    auto value = Value(output, limits);
    if (!value.ok())
      return Annotated(absl::StrCat("output ", Quoted(output.name())), value.status());
    graph.outputs.push_back(*std::move(value));
  }
  return absl::OkStatus();
}

// ---- constants

absl::Status AddConstant(const std::string& name, absl::StatusOr<Tensor> tensor,
                         absl::string_view what, ModelGraph& graph) {
  if (!tensor.ok()) return Annotated(what, tensor.status());
  if (graph.initializers.try_emplace(name, *std::move(tensor)).second) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": there is already a constant of the name ", Quoted(name)));
}

// Takes the messages out of their list one by one, so that each is freed when it has been decoded.
template <typename Proto, typename Fn>
absl::Status Drain(google::protobuf::RepeatedPtrField<Proto>& list, Fn&& fn) {
  std::vector<Proto*> taken(static_cast<size_t>(list.size()));
  list.ExtractSubrange(0, list.size(), taken.data());
  std::vector<std::unique_ptr<Proto>> owned(taken.begin(), taken.end());
  for (auto& proto : owned) {
    if (auto status = fn(*proto); !status.ok()) return status;
    proto.reset();
  }
  return absl::OkStatus();
}

absl::Status ReadInitializers(onnx::GraphProto& proto, OnnxConstants& constants,
                              ModelGraph& graph) {
  auto status = Drain(*proto.mutable_initializer(), [&](const onnx::TensorProto& tensor) {
    return AddConstant(tensor.name(), constants.Dense(tensor),
                       absl::StrCat("initializer ", Quoted(tensor.name())), graph);
  });
  if (!status.ok()) return status;
  return Drain(*proto.mutable_sparse_initializer(), [&](const onnx::SparseTensorProto& tensor) {
    return AddConstant(tensor.values().name(), constants.Sparse(tensor),
                       absl::StrCat("sparse initializer ", Quoted(tensor.values().name())), graph);
  });
}

// ---- nodes

absl::Status CheckNode(const onnx::NodeProto& proto) {
  if (auto status = CheckName("its operator", proto.op_type()); !status.ok()) return status;
  if (IsOnnxDomain(proto.domain())) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("operators of the domain ", Quoted(proto.domain()),
                                               " are not supported, only those of ai.onnx"));
}

absl::Status FoldConstant(const onnx::NodeProto& proto, absl::string_view what,
                          OnnxConstants& constants, ModelGraph& graph) {
  if (proto.input_size() != 0 || proto.output_size() != 1 || proto.output(0).empty()) {
    return absl::InvalidArgumentError(absl::StrCat(what, " has ", proto.input_size(),
                                                   " inputs and ", proto.output_size(),
                                                   " outputs, expected 0 and 1"));
  }
  return AddConstant(proto.output(0), ReadOnnxConstant(proto, constants), what, graph);
}

absl::Status ReadNode(const onnx::NodeProto& proto, OnnxConstants& constants, Node& node) {
  node.inputs.assign(proto.input().begin(), proto.input().end());
  node.outputs.assign(proto.output().begin(), proto.output().end());
  for (const auto& attribute : proto.attribute()) {
    auto value = ReadOnnxAttribute(attribute, constants);
    if (!value.ok()) return value.status();
    if (!node.attributes.try_emplace(attribute.name(), *std::move(value)).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("attribute ", Quoted(attribute.name()), " is given twice"));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadNodes(onnx::GraphProto& proto, OnnxConstants& constants, ModelGraph& graph) {
  absl::flat_hash_set<std::string> names;  // that anonymous nodes cannot have
  for (const auto& node : proto.node()) names.insert(node.name());
  int index = -1;
  return Drain(*proto.mutable_node(), [&](const onnx::NodeProto& node_proto) {
    ++index;
    Node node;
    node.op_type = node_proto.op_type();
    node.name = node_proto.name();
    if (node.name.empty()) {
      node.name = absl::StrCat(node.op_type, "_", index);
      while (!names.insert(node.name).second) node.name += '_';
    }
    if (auto status = CheckNode(node_proto); !status.ok()) return Annotated(Describe(node), status);
    if (node.op_type == "Constant") {
      return FoldConstant(node_proto, Describe(node), constants, graph);
    }
    auto status = ReadNode(node_proto, constants, node);
    if (!status.ok()) return Annotated(Describe(node), status);
    graph.nodes.push_back(std::move(node));
    return status;
  });
}

}  // namespace

absl::Status ReadOnnxGraph(onnx::GraphProto& proto, OnnxConstants& constants,
                           const ReadLimits& limits, ModelGraph& graph) {
  if (proto.node_size() > limits.max_nodes) {
    return absl::ResourceExhaustedError(absl::StrCat("the graph has ", proto.node_size(),
                                                     " nodes, the limit is ", limits.max_nodes));
  }
  if (auto status = ReadValues(proto, limits, graph); !status.ok()) return status;
  if (auto status = ReadInitializers(proto, constants, graph); !status.ok()) return status;
  return ReadNodes(proto, constants, graph);
}

}  // namespace espalier::formats
