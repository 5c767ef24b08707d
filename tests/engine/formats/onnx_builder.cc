#include "tests/engine/formats/onnx_builder.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "engine/formats/onnx_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace espalier::testing {
namespace {

void AddValue(onnx::ValueInfoProto& value, const std::string& name, int64_t features) {
  value.set_name(name);
  auto& type = *value.mutable_type()->mutable_tensor_type();
  type.set_elem_type(onnx::TensorProto::FLOAT);
  type.mutable_shape()->add_dim()->set_dim_param("N");
  type.mutable_shape()->add_dim()->set_dim_value(features);
}

}  // namespace

onnx::ModelProto SmallModel() {
  onnx::ModelProto model;
  model.set_ir_version(8);
  model.add_opset_import()->set_version(17);
  auto& graph = *model.mutable_graph();
  graph.set_name("small");
  AddValue(*graph.add_input(), "x", 3);
  AddValue(*graph.add_output(), "y", 2);
  *graph.add_initializer() =
      MakeRaw<float>("w", onnx::TensorProto::FLOAT, {2, 3}, {1, 0, 2, 0, 3, 0});
  auto& bias = *graph.add_initializer() = MakeTensor("b", onnx::TensorProto::FLOAT, {2});
  bias.add_float_data(4);
  bias.add_float_data(5);
  auto* gemm = AddNode(model, "fc", "Gemm", {"x", "w", "b"}, {"h"});
  AddAttribute(*gemm, "transB", onnx::AttributeProto::INT)->set_i(1);
  AddNode(model, "relu", "Relu", {"h"}, {"y"});
  return model;
}

onnx::NodeProto* AddNode(onnx::ModelProto& model, const std::string& name, const std::string& op,
                         const std::vector<std::string>& inputs,
                         const std::vector<std::string>& outputs) {
  auto* node = model.mutable_graph()->add_node();
  if (!name.empty()) node->set_name(name);
  node->set_op_type(op);
  for (const auto& input : inputs) node->add_input(input);
  for (const auto& output : outputs) node->add_output(output);
  return node;
}

onnx::AttributeProto* AddAttribute(onnx::NodeProto& node, const std::string& name,
                                   onnx::AttributeProto::AttributeType type) {
  auto* attribute = node.add_attribute();
  attribute->set_name(name);
  attribute->set_type(type);
  return attribute;
}

onnx::TensorProto MakeTensor(const std::string& name, int type, const std::vector<int64_t>& dims) {
  onnx::TensorProto tensor;
  tensor.set_name(name);
  tensor.set_data_type(type);
  for (int64_t dim : dims) tensor.add_dims(dim);
  return tensor;
}

onnx::SparseTensorProto MakeSparse(const std::string& name, const std::vector<int64_t>& dims,
                                   const std::vector<float>& values,
                                   const std::vector<int64_t>& index_dims,
                                   const std::vector<int64_t>& indices) {
  onnx::SparseTensorProto sparse;
  *sparse.mutable_values() =
      MakeRaw(name, onnx::TensorProto::FLOAT, {static_cast<int64_t>(values.size())}, values);
  *sparse.mutable_indices() = MakeRaw("", onnx::TensorProto::INT64, index_dims, indices);
  for (int64_t dim : dims) sparse.add_dims(dim);
  return sparse;
}

void SetExternal(onnx::TensorProto& tensor,
                 std::initializer_list<std::pair<const char*, std::string>> entries) {
  tensor.clear_raw_data();
  tensor.set_data_location(onnx::TensorProto::EXTERNAL);
  for (const auto& [key, value] : entries) {
    auto* entry = tensor.add_external_data();
    entry->set_key(key);
    entry->set_value(value);
  }
}

absl::StatusOr<formats::ModelGraph> Read(const onnx::ModelProto& model,
                                         const std::string& directory,
                                         const formats::ReadLimits& limits) {
  return formats::ReadOnnxBytes(model.SerializeAsString(), "m.onnx", directory, limits);
}

void ExpectRefused(const absl::Status& status, absl::StatusCode code,
                   const std::vector<std::string>& parts) {
  EXPECT_EQ(status.code(), code) << status;
  for (const auto& part : parts)
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(part));
}

TemporaryFolder::TemporaryFolder() {
  path_ = ::testing::TempDir() + "/espalier_XXXXXX";
  if (mkdtemp(path_.data()) == nullptr) ADD_FAILURE() << "cannot create " << path_;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string TemporaryFolder::Write(const std::string& name, const std::string& contents) const {
  const std::filesystem::path path = std::filesystem::path(path_) / name;
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << contents;
  return path.string();
}

}  // namespace espalier::testing
