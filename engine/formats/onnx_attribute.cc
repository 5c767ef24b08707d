#include "engine/formats/onnx_attribute.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"

namespace espalier::formats {
namespace {

using onnx::AttributeProto;

absl::Status Annotated(const AttributeProto& proto, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat("attribute ", Quoted(proto.name()), ": ", status.message()));
}

// How many of the value fields are set; a list counts when it has elements.
int SetFields(const AttributeProto& proto) {
  return proto.has_f() + proto.has_i() + proto.has_s() + proto.has_t() + proto.has_g() +
         proto.has_sparse_tensor() + proto.has_tp() + (proto.floats_size() > 0) +
         (proto.ints_size() > 0) + (proto.strings_size() > 0) + (proto.tensors_size() > 0) +
         (proto.graphs_size() > 0) + (proto.sparse_tensors_size() > 0) +
         (proto.type_protos_size() > 0);
}

bool HoldsItsType(const AttributeProto& proto) {
  const int set = SetFields(proto);
  const auto list = [set](int size) { return set == (size > 0); };
  switch (proto.type()) {
    case AttributeProto::FLOAT:
      return set == 1 && proto.has_f();
    case AttributeProto::INT:
      return set == 1 && proto.has_i();
    case AttributeProto::STRING:
      return set == 1 && proto.has_s();
    case AttributeProto::TENSOR:
      return set == 1 && proto.has_t();
    case AttributeProto::GRAPH:
      return set == 1 && proto.has_g();
    case AttributeProto::SPARSE_TENSOR:
      return set == 1 && proto.has_sparse_tensor();
    case AttributeProto::TYPE_PROTO:
      return set == 1 && proto.has_tp();
    case AttributeProto::FLOATS:
      return list(proto.floats_size());
    case AttributeProto::INTS:
      return list(proto.ints_size());
    case AttributeProto::STRINGS:
      return list(proto.strings_size());
    case AttributeProto::TENSORS:
      return list(proto.tensors_size());
    case AttributeProto::GRAPHS:
      return list(proto.graphs_size());
    case AttributeProto::SPARSE_TENSORS:
      return list(proto.sparse_tensors_size());
    case AttributeProto::TYPE_PROTOS:
      return list(proto.type_protos_size());
    case AttributeProto::UNDEFINED:
      return false;
  }
  return false;
}

absl::Status CheckAttribute(const AttributeProto& proto) {
  if (auto status = CheckName("an attribute", proto.name()); !status.ok()) return status;
  if (proto.has_ref_attr_name()) {
    return Annotated(
        proto, absl::InvalidArgumentError("refers to an attribute of a function, but is in none"));
  }
  if (proto.type() == AttributeProto::UNDEFINED) {
    return Annotated(proto, absl::InvalidArgumentError("no type is given"));
  }
  if (!HoldsItsType(proto)) {
    return Annotated(
        proto, absl::InvalidArgumentError(absl::StrCat(
                   "expected one value of its type ",
                   AttributeProto::AttributeType_Name(proto.type()), ", got ", SetFields(proto),
                   SetFields(proto) == 1 ? " value of another type" : " values")));
  }
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<Tensor> Vector(DType dtype, const T* data, int64_t count, bool scalar) {
  auto tensor = Tensor::Allocate(dtype, scalar ? Shape{} : Shape{count});
  if (tensor.ok()) std::copy(data, data + count, tensor->template As<T>());
  return tensor;
}

absl::StatusOr<Attribute> Value(const AttributeProto& proto, OnnxConstants& constants) {
  switch (proto.type()) {
    case AttributeProto::FLOAT:
      return proto.f();
    case AttributeProto::INT:
      return proto.i();
    case AttributeProto::STRING:
      return proto.s();
    case AttributeProto::FLOATS:
      return std::vector<float>(proto.floats().begin(), proto.floats().end());
    case AttributeProto::INTS:
      return std::vector<int64_t>(proto.ints().begin(), proto.ints().end());
    case AttributeProto::TENSOR: {
      auto tensor = constants.Dense(proto.t());
      if (!tensor.ok()) return tensor.status();
      return *std::move(tensor);
    }
    case AttributeProto::SPARSE_TENSOR: {
      auto tensor = constants.Sparse(proto.sparse_tensor());
      if (!tensor.ok()) return tensor.status();
      return *std::move(tensor);
    }
    case AttributeProto::GRAPH:
    case AttributeProto::GRAPHS:
      return absl::UnimplementedError("control flow (graph attributes) is not supported");
    default:
      return absl::UnimplementedError(absl::StrCat(
          "type ", AttributeProto::AttributeType_Name(proto.type()), " is not supported"));
  }
}

}  // namespace

absl::StatusOr<Attribute> ReadOnnxAttribute(const AttributeProto& proto, OnnxConstants& constants) {
  if (auto status = CheckAttribute(proto); !status.ok()) return status;
  auto value = Value(proto, constants);
  return value.ok() ? std::move(value) : Annotated(proto, value.status());
}

absl::StatusOr<Tensor> ReadOnnxConstant(const onnx::NodeProto& node, OnnxConstants& constants) {
  if (node.attribute_size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", node.attribute_size(), " attributes, expected one value"));
  }
  const AttributeProto& proto = node.attribute(0);
  struct Kind {
    const char* name;
    AttributeProto::AttributeType type;
  };
  static constexpr Kind kKinds[] = {
      {"value", AttributeProto::TENSOR},        {"sparse_value", AttributeProto::SPARSE_TENSOR},
      {"value_float", AttributeProto::FLOAT},   {"value_floats", AttributeProto::FLOATS},
      {"value_int", AttributeProto::INT},       {"value_ints", AttributeProto::INTS},
      {"value_string", AttributeProto::STRING}, {"value_strings", AttributeProto::STRINGS},
  };
  if (auto status = CheckAttribute(proto); !status.ok()) return status;
  const auto* kind = std::find_if(std::begin(kKinds), std::end(kKinds), [&](const Kind& candidate) {
    return candidate.name == proto.name();
  });
  if (kind == std::end(kKinds)) {
    return Annotated(proto, absl::InvalidArgumentError("is no attribute of Constant"));
  }
  if (kind->type != proto.type()) {
    return Annotated(proto, absl::InvalidArgumentError(absl::StrCat(
                                "expected ", AttributeProto::AttributeType_Name(kind->type),
                                ", got ", AttributeProto::AttributeType_Name(proto.type()))));
  }
  absl::StatusOr<Tensor> tensor = absl::UnimplementedError("string tensors are not supported");
  const float one_float = proto.f();
  const int64_t one_int = proto.i();
  switch (kind->type) {
    case AttributeProto::TENSOR:
      tensor = constants.Dense(proto.t());
      break;
    case AttributeProto::SPARSE_TENSOR:
      tensor = constants.Sparse(proto.sparse_tensor());
      break;
    case AttributeProto::FLOAT:
      tensor = Vector(DType::kFloat32, &one_float, 1, true);
      break;
    case AttributeProto::INT:
      tensor = Vector(DType::kInt64, &one_int, 1, true);
      break;
    case AttributeProto::FLOATS:
      tensor = Vector(DType::kFloat32, proto.floats().data(), proto.floats_size(), false);
      break;
    case AttributeProto::INTS:
      tensor = Vector(DType::kInt64, proto.ints().data(), proto.ints_size(), false);
      break;
    default:
      break;
  }
  return tensor.ok() ? std::move(tensor) : Annotated(proto, tensor.status());
}

}  // namespace espalier::formats
