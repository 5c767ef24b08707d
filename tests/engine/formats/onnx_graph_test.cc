// What holds a model together: values, names, nodes, attributes, order. One smallest input for each refusal.
#include <limits>

#include "engine/formats/onnx_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/formats/onnx_builder.h"

namespace espalier::formats {
namespace {

using absl::StatusCode;
using espalier::testing::AddAttribute;
using espalier::testing::AddNode;
using espalier::testing::Elements;
using espalier::testing::ExpectRefused;
using espalier::testing::MakeRaw;
using espalier::testing::MakeSparse;
using espalier::testing::MakeTensor;
using espalier::testing::Read;
using espalier::testing::SmallModel;
using onnx::AttributeProto;
using onnx::ModelProto;
using onnx::TensorProto;
using ::testing::ElementsAre;

void ExpectInvalid(const ModelProto& model, const std::vector<std::string>& parts) {
  auto all = parts;
  all.push_back("m.onnx: ");
  ExpectRefused(Read(model).status(), StatusCode::kInvalidArgument, all);
}

void ExpectUnimplemented(const ModelProto& model, const std::vector<std::string>& parts) {
  auto all = parts;
  all.push_back("m.onnx: ");
  ExpectRefused(Read(model).status(), StatusCode::kUnimplemented, all);
}

onnx::TensorShapeProto::Dimension* InputDim(ModelProto& model, int axis) {
  return model.mutable_graph()
      ->mutable_input(0)
      ->mutable_type()
      ->mutable_tensor_type()
      ->mutable_shape()
      ->mutable_dim(axis);
}

std::vector<std::string> NodeNames(const ModelGraph& graph) {
  std::vector<std::string> names;
  for (const Node& node : graph.nodes) names.push_back(node.name);
  return names;
}

TEST(OnnxGraphTest, AModelIsReadWithItsValuesConstantsAndNodes) {
  const auto graph = Read(SmallModel());
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(graph->source, "m.onnx");
  EXPECT_EQ(graph->opset, 17);
  ASSERT_EQ(graph->inputs.size(), 1u);
  EXPECT_EQ(graph->inputs[0].name, "x");
  EXPECT_EQ(graph->inputs[0].dtype, DType::kFloat32);
  EXPECT_THAT(graph->inputs[0].shape, ElementsAre(kBatch, 3));
  ASSERT_EQ(graph->outputs.size(), 1u);
  EXPECT_THAT(graph->outputs[0].shape, ElementsAre(kBatch, 2));
  EXPECT_THAT(Elements<float>(graph->initializers.at("w")), ElementsAre(1, 0, 2, 0, 3, 0));
  EXPECT_THAT(Elements<float>(graph->initializers.at("b")), ElementsAre(4, 5));
  ASSERT_THAT(NodeNames(*graph), ElementsAre("fc", "relu"));
  EXPECT_THAT(graph->nodes[0].inputs, ElementsAre("x", "w", "b"));
  EXPECT_EQ(std::get<int64_t>(graph->nodes[0].attributes.at("transB")), 1);
}

TEST(OnnxGraphTest, ASparseInitializerStandsInForADenseOne) {
  for (const auto& sparse : {MakeSparse("w", {2, 3}, {1, 2, 3}, {3}, {0, 2, 4}),
                             MakeSparse("w", {2, 3}, {1, 2, 3}, {3, 2}, {0, 0, 0, 2, 1, 1})}) {
    ModelProto model = SmallModel();
    model.mutable_graph()->mutable_initializer()->DeleteSubrange(0, 1);
    *model.mutable_graph()->add_sparse_initializer() = sparse;
    const auto graph = Read(model);
    ASSERT_TRUE(graph.ok()) << graph.status();
    EXPECT_THAT(Elements<float>(graph->initializers.at("w")), ElementsAre(1, 0, 2, 0, 3, 0));
  }
}

// ---- model

TEST(OnnxGraphTest, VersionsOutsideTheKnownRangeAreNamed) {
  ModelProto model = SmallModel();
  for (int64_t version : {3, 13}) {
    model.set_ir_version(version);
    EXPECT_TRUE(Read(model).ok());
  }
  model.set_ir_version(14);
  ExpectUnimplemented(model, {"IR version 14, supported are 3 to 13"});
  model.set_ir_version(2);
  ExpectUnimplemented(model, {"IR version 2"});
  model.clear_ir_version();
  ExpectInvalid(model, {"IR version 0"});

  model = SmallModel();
  for (int64_t version : {7, 27}) {
    model.mutable_opset_import(0)->set_version(version);
    EXPECT_EQ(Read(model)->opset, version);
  }
  model.mutable_opset_import(0)->set_version(28);
  ExpectUnimplemented(model, {"opset 28 of ai.onnx, supported are 7 to 27"});
  model.mutable_opset_import(0)->set_version(6);
  ExpectUnimplemented(model, {"opset 6"});
  model.clear_opset_import();
  ExpectInvalid(model, {"imports no opset"});
  model.add_opset_import()->set_domain("com.microsoft");
  ExpectInvalid(model, {"imports no opset"});
}

TEST(OnnxGraphTest, TheStandardDomainHasTwoNamesAndOneVersion) {
  ModelProto model = SmallModel();
  model.mutable_opset_import(0)->set_domain("ai.onnx");
  model.mutable_graph()->mutable_node(0)->set_domain("ai.onnx");
  const auto graph = Read(model);
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(graph->nodes[0].domain, "");
  model.add_opset_import()->set_version(13);
  ExpectInvalid(model, {"imports the opset of ai.onnx twice"});
}

TEST(OnnxGraphTest, ForeignDomainsAreRefusedOnlyWhereANodeUsesThem) {
  ModelProto model = SmallModel();
  auto* import = model.add_opset_import();
  import->set_domain("com.microsoft");
  import->set_version(1);
  EXPECT_TRUE(Read(model).ok());
  model.mutable_graph()->mutable_node(1)->set_domain("com.microsoft");
  ExpectUnimplemented(model, {"node 'relu' (Relu)", "'com.microsoft'"});
}

TEST(OnnxGraphTest, ModelLocalFunctionsAreRefusedByName) {
  ModelProto model = SmallModel();
  model.add_functions()->set_name("MyGelu");
  ExpectUnimplemented(model, {"function 'MyGelu'"});
}

TEST(OnnxGraphTest, AModelWithoutGraphOrOutputsIsRefused) {
  ModelProto model = SmallModel();
  model.clear_graph();
  ExpectInvalid(model, {"has no graph"});
  model = SmallModel();
  model.mutable_graph()->clear_output();
  ExpectInvalid(model, {"no outputs"});
}

TEST(OnnxGraphTest, MoreNodesThanTheLimitAreRefused) {
  ReadLimits limits;
  limits.max_nodes = 1;
  ExpectRefused(Read(SmallModel(), "", limits).status(), StatusCode::kResourceExhausted,
                {"has 2 nodes, the limit is 1"});
}

// ---- inputs and outputs

TEST(OnnxGraphTest, AFirstDimensionWithoutANumberIsTheBatch) {
  ModelProto model = SmallModel();
  InputDim(model, 0)->Clear();
  EXPECT_THAT(Read(model)->inputs[0].shape, ElementsAre(kBatch, 3));
  InputDim(model, 0)->set_dim_value(-1);
  EXPECT_THAT(Read(model)->inputs[0].shape, ElementsAre(kBatch, 3));
  InputDim(model, 0)->set_dim_value(4);
  EXPECT_THAT(Read(model)->inputs[0].shape, ElementsAre(4, 3));
}

TEST(OnnxGraphTest, OtherDimensionsNeedAPositiveNumber) {
  ModelProto model = SmallModel();
  InputDim(model, 1)->set_dim_param("seq");
  ExpectUnimplemented(model, {"input 'x'", "dimension 1 is symbolic ('seq')"});
  InputDim(model, 1)->Clear();
  ExpectUnimplemented(model, {"dimension 1 is symbolic"});
  InputDim(model, 1)->set_dim_value(-1);
  ExpectInvalid(model, {"dimension 1 is -1, expected a positive number"});
  InputDim(model, 1)->set_dim_value(0);
  ExpectUnimplemented(model, {"dimension 1 is 0"});
  model = SmallModel();
  InputDim(model, 0)->set_dim_value(-2);
  ExpectInvalid(model, {"dimension 0 is -2"});
}

TEST(OnnxGraphTest, InputsTooLargeForAnyTensorAreRefused) {
  ModelProto model = SmallModel();
  InputDim(model, 1)->set_dim_value(int64_t{1} << 40);
  ExpectRefused(Read(model).status(), StatusCode::kResourceExhausted,
                {"input 'x'", "[-1, 1099511627776] of FP32"});
  InputDim(model, 0)->set_dim_value(int64_t{1} << 40);
  ExpectInvalid(model, {"input 'x'", "2^62"});
  model = SmallModel();
  for (int i = 0; i < 40; ++i) {
    model.mutable_graph()
        ->mutable_input(0)
        ->mutable_type()
        ->mutable_tensor_type()
        ->mutable_shape()
        ->add_dim()
        ->set_dim_value(1);
  }
  ExpectInvalid(model, {"has 42 dimensions, expected at most 32"});
}

TEST(OnnxGraphTest, ValuesWithoutATensorTypeOrShapeAreRefused) {
  ModelProto model = SmallModel();
  auto& type = *model.mutable_graph()->mutable_output(0)->mutable_type();
  type.mutable_tensor_type()->clear_shape();
  ExpectUnimplemented(model, {"output 'y'", "has no shape"});
  type.mutable_tensor_type()->set_elem_type(TensorProto::STRING);
  ExpectUnimplemented(model, {"output 'y'", "STRING"});
  type.mutable_tensor_type()->clear_elem_type();
  ExpectInvalid(model, {"output 'y'", "no element type"});
  type.mutable_sequence_type();
  ExpectUnimplemented(model, {"is a sequence, only tensors"});
  type.Clear();
  ExpectInvalid(model, {"output 'y'", "has no type"});
}

TEST(OnnxGraphTest, AnInitializerThatIsAlsoAnInputIsAConstant) {
  ModelProto model = SmallModel();
  model.mutable_graph()->add_input()->set_name("w");
  const auto graph = Read(model);
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(graph->inputs.size(), 1u);
  EXPECT_TRUE(graph->initializers.contains("w"));
}

// ---- names

TEST(OnnxGraphTest, ANameIsGivenOnce) {
  ModelProto model = SmallModel();
  *model.mutable_graph()->add_input() = model.graph().input(0);
  ExpectInvalid(model, {"input 'x' is listed twice"});

  model = SmallModel();
  *model.mutable_graph()->add_output() = model.graph().output(0);
  ExpectInvalid(model, {"two outputs are named 'y'"});

  model = SmallModel();
  *model.mutable_graph()->add_initializer() = model.graph().initializer(0);
  ExpectInvalid(model, {"initializer 'w'", "already a constant"});

  model = SmallModel();
  *model.mutable_graph()->add_sparse_initializer() = MakeSparse("w", {2, 3}, {1}, {1}, {0});
  ExpectInvalid(model, {"sparse initializer 'w'", "already a constant"});

  model = SmallModel();
  model.mutable_graph()->mutable_node(1)->set_name("fc");
  ExpectInvalid(model, {"two nodes are named 'fc'"});

  model = SmallModel();
  AddNode(model, "again", "Relu", {"x"}, {"h"});
  ExpectInvalid(
      model, {"node 'again' (Relu) produces 'h', which is already produced by node 'fc' (Gemm)"});

  model = SmallModel();
  model.mutable_graph()->mutable_node(0)->set_output(0, "x");
  ExpectInvalid(model, {"node 'fc' (Gemm) produces 'x', which is already an input or a constant"});

  model = SmallModel();
  auto* constant = AddNode(model, "c", "Constant", {}, {"x"});
  AddAttribute(*constant, "value_int", AttributeProto::INT)->set_i(1);
  ExpectInvalid(model, {"'x' is both an input and a constant"});

  model = SmallModel();
  constant = AddNode(model, "c", "Constant", {}, {"w"});
  AddAttribute(*constant, "value_int", AttributeProto::INT)->set_i(1);
  ExpectInvalid(model, {"node 'c' (Constant)", "already a constant of the name 'w'"});
}

TEST(OnnxGraphTest, NamesArePrintableUtf8OfSomeLength) {
  ModelProto model = SmallModel();
  model.mutable_graph()->mutable_node(0)->set_name("bad\nname");
  ExpectInvalid(model, {"a node 'bad\\nname' is not printable UTF-8"});
  model.mutable_graph()->mutable_node(0)->set_name("bad\xff");
  ExpectInvalid(model, {"'bad\\xff'"});
  model.mutable_graph()->mutable_node(0)->set_name(std::string(4097, 'a'));
  ExpectInvalid(model, {"has 4097 bytes, expected at most 4096", "… (4097 bytes)"});
  model.mutable_graph()->mutable_node(0)->set_name("größe/π");
  EXPECT_TRUE(Read(model).ok());
  model.mutable_graph()->mutable_node(0)->clear_op_type();
  ExpectInvalid(model, {"its operator is empty"});
  model = SmallModel();
  model.mutable_graph()->mutable_initializer(0)->clear_name();
  ExpectInvalid(model, {"the name of a constant is empty"});
  model = SmallModel();
  model.mutable_graph()->mutable_input(0)->clear_name();
  ExpectInvalid(model, {"the name of an input is empty"});
}

TEST(OnnxGraphTest, AnonymousNodesAreNumberedAroundGivenNames) {
  ModelProto model = SmallModel();
  model.mutable_graph()->mutable_node(0)->clear_name();
  model.mutable_graph()->mutable_node(1)->set_name("Gemm_0");
  EXPECT_THAT(NodeNames(*Read(model)), ElementsAre("Gemm_0_", "Gemm_0"));
}

// ---- how nodes hang together

TEST(OnnxGraphTest, UndefinedInputsAndOutputsAreNamed) {
  ModelProto model = SmallModel();
  model.mutable_graph()->mutable_node(1)->set_input(0, "nowhere");
  ExpectInvalid(model, {"node 'relu' (Relu) reads 'nowhere' as input 0"});
  model = SmallModel();
  model.mutable_graph()->mutable_output(0)->set_name("z");
  ExpectInvalid(model, {"output 'z' is produced by no node"});
}

TEST(OnnxGraphTest, OmittedOptionalInputsStayInPlace) {
  ModelProto model = SmallModel();
  model.mutable_graph()->mutable_node(0)->set_input(2, "");
  const auto graph = Read(model);
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_THAT(graph->nodes[0].inputs, ElementsAre("x", "w", ""));
}

TEST(OnnxGraphTest, ANodeHasAnOutput) {
  ModelProto model = SmallModel();
  AddNode(model, "sink", "Relu", {"x"}, {});
  ExpectInvalid(model, {"node 'sink' (Relu) has no output"});
  model.mutable_graph()->mutable_node(2)->add_output("");
  ExpectInvalid(model, {"node 'sink' (Relu) has no output"});
}

TEST(OnnxGraphTest, NodesOutOfOrderAreSorted) {
  ModelProto model = SmallModel();
  model.mutable_graph()->mutable_node()->SwapElements(0, 1);
  EXPECT_THAT(NodeNames(*Read(model)), ElementsAre("fc", "relu"));
  // What is in order keeps its order, independent branches included.
  model = SmallModel();
  AddNode(model, "b2", "Relu", {"x"}, {"b2"});
  AddNode(model, "b1", "Relu", {"x"}, {"b1"});
  EXPECT_THAT(NodeNames(*Read(model)), ElementsAre("fc", "relu", "b2", "b1"));
}

TEST(OnnxGraphTest, ACycleIsRefusedWithItsNodes) {
  ModelProto model = SmallModel();
  model.mutable_graph()->mutable_node(0)->set_input(0, "y");
  ExpectInvalid(model, {"cycle: ", "node 'relu' (Relu) → node 'fc' (Gemm) → node 'relu' (Relu)"});
  model = SmallModel();
  model.mutable_graph()->mutable_node(1)->set_input(0, "y");
  ExpectInvalid(model, {"cycle: node 'relu' (Relu) → node 'relu' (Relu)"});
}

TEST(OnnxGraphTest, ALongCycleBehindInnocentNodesIsShortened) {
  ModelProto model = SmallModel();
  for (int i = 0; i < 20; ++i) {
    AddNode(model, "c" + std::to_string(i), "Relu", {"v" + std::to_string((i + 19) % 20)},
            {"v" + std::to_string(i)});
  }
  AddNode(model, "after", "Relu", {"v3"}, {"after"});
  const auto status = Read(model).status();
  ExpectRefused(status, StatusCode::kInvalidArgument, {"cycle: ", "… 12 more"});
  EXPECT_THAT(std::string(status.message()), ::testing::Not(::testing::HasSubstr("after")));
}

// ---- attributes

TEST(OnnxGraphTest, AttributesOfEverySupportedTypeAreRead) {
  ModelProto model = SmallModel();
  auto& node = *model.mutable_graph()->mutable_node(1);
  AddAttribute(node, "f", AttributeProto::FLOAT)->set_f(0.5f);
  AddAttribute(node, "s", AttributeProto::STRING)->set_s("tanh");
  AddAttribute(node, "none", AttributeProto::INTS);
  auto* ints = AddAttribute(node, "ints", AttributeProto::INTS);
  ints->add_ints(1);
  ints->add_ints(-2);
  AddAttribute(node, "floats", AttributeProto::FLOATS)->add_floats(3);
  *AddAttribute(node, "t", AttributeProto::TENSOR)->mutable_t() =
      MakeRaw<int64_t>("", TensorProto::INT64, {1}, {6});
  *AddAttribute(node, "sparse", AttributeProto::SPARSE_TENSOR)->mutable_sparse_tensor() =
      MakeSparse("", {2}, {7}, {1}, {1});
  const auto graph = Read(model);
  ASSERT_TRUE(graph.ok()) << graph.status();
  const auto& read = graph->nodes[1].attributes;
  EXPECT_EQ(std::get<float>(read.at("f")), 0.5f);
  EXPECT_EQ(std::get<std::string>(read.at("s")), "tanh");
  EXPECT_TRUE(std::get<std::vector<int64_t>>(read.at("none")).empty());
  EXPECT_THAT(std::get<std::vector<int64_t>>(read.at("ints")), ElementsAre(1, -2));
  EXPECT_THAT(std::get<std::vector<float>>(read.at("floats")), ElementsAre(3));
  EXPECT_THAT(Elements<int64_t>(std::get<Tensor>(read.at("t"))), ElementsAre(6));
  EXPECT_THAT(Elements<float>(std::get<Tensor>(read.at("sparse"))), ElementsAre(0, 7));
}

TEST(OnnxGraphTest, AttributesWhoseTypeAndValueDisagreeAreRefused) {
  const auto with = [](auto&& fill) {
    ModelProto model = SmallModel();
    fill(*model.mutable_graph()->mutable_node(1)->add_attribute());
    return model;
  };
  ExpectInvalid(with([](AttributeProto& a) { a.set_name("a"); }),
                {"node 'relu' (Relu): attribute 'a'", "no type"});
  ExpectInvalid(with([](AttributeProto& a) { a.set_type(AttributeProto::INT); }),
                {"node 'relu'", "attribute is empty"});
  ExpectInvalid(with([](AttributeProto& a) {
                  a.set_name("a");
                  a.set_type(AttributeProto::INT);
                }),
                {"attribute 'a': expected one value of its type INT, got 0 values"});
  ExpectInvalid(with([](AttributeProto& a) {
                  a.set_name("a");
                  a.set_type(AttributeProto::INT);
                  a.set_f(1);
                }),
                {"type INT, got 1 value of another type"});
  ExpectInvalid(with([](AttributeProto& a) {
                  a.set_name("a");
                  a.set_type(AttributeProto::INTS);
                  a.add_ints(1);
                  a.add_floats(1);
                }),
                {"type INTS, got 2 values"});
  ExpectInvalid(with([](AttributeProto& a) {
                  a.set_name("a");
                  a.set_ref_attr_name("alpha");
                }),
                {"attribute 'a': refers to an attribute of a function"});
  ModelProto twice = SmallModel();
  AddAttribute(*twice.mutable_graph()->mutable_node(0), "transB", AttributeProto::INT)->set_i(0);
  ExpectInvalid(twice, {"node 'fc' (Gemm): attribute 'transB' is given twice"});
}

TEST(OnnxGraphTest, ControlFlowAndOtherAttributeTypesNameTheNode) {
  const auto with = [](AttributeProto::AttributeType type, auto&& fill) {
    ModelProto model = SmallModel();
    fill(*AddAttribute(*model.mutable_graph()->mutable_node(1), "a", type));
    return model;
  };
  ExpectUnimplemented(with(AttributeProto::GRAPH, [](AttributeProto& a) { a.mutable_g(); }),
                      {"node 'relu' (Relu): attribute 'a': control flow"});
  ExpectUnimplemented(with(AttributeProto::GRAPHS, [](AttributeProto& a) { a.add_graphs(); }),
                      {"control flow"});
  ExpectUnimplemented(with(AttributeProto::STRINGS, [](AttributeProto& a) { a.add_strings("s"); }),
                      {"type STRINGS"});
  ExpectUnimplemented(with(AttributeProto::TENSORS, [](AttributeProto& a) { a.add_tensors(); }),
                      {"type TENSORS"});
  ExpectUnimplemented(with(AttributeProto::TYPE_PROTO, [](AttributeProto& a) { a.mutable_tp(); }),
                      {"type TYPE_PROTO"});
}

TEST(OnnxGraphTest, ErrorsInATensorNameTheNodeAndAttribute) {
  ModelProto model = SmallModel();
  *AddAttribute(*model.mutable_graph()->mutable_node(1), "t", AttributeProto::TENSOR)->mutable_t() =
      MakeTensor("", TensorProto::FLOAT, {1});
  ExpectInvalid(
      model, {"node 'relu' (Relu): attribute 't': raw_data of FLOAT [1] has 0 bytes, expected 4"});
  model = SmallModel();
  model.mutable_graph()->mutable_initializer(0)->set_raw_data("x");
  ExpectInvalid(model, {"initializer 'w': raw_data of FLOAT [2, 3] has 1 bytes, expected 24"});
}

// ---- Constant nodes

TEST(OnnxConstantTest, ConstantNodesOfEveryFormBecomeInitializers) {
  const auto read = [](AttributeProto::AttributeType type, const std::string& name, auto&& fill) {
    ModelProto model = SmallModel();
    fill(*AddAttribute(*AddNode(model, "c", "Constant", {}, {"c"}), name, type));
    auto graph = Read(model);
    EXPECT_TRUE(graph.ok()) << graph.status();
    EXPECT_THAT(NodeNames(*graph), ElementsAre("fc", "relu"));
    return std::move(graph->initializers.at("c"));
  };
  EXPECT_THAT(
      Elements<float>(read(AttributeProto::TENSOR, "value",
                           [](AttributeProto& a) {
                             *a.mutable_t() = MakeRaw<float>("", TensorProto::FLOAT, {2}, {1, 2});
                           })),
      ElementsAre(1, 2));
  EXPECT_THAT(Elements<float>(read(AttributeProto::SPARSE_TENSOR, "sparse_value",
                                   [](AttributeProto& a) {
                                     *a.mutable_sparse_tensor() =
                                         MakeSparse("", {3}, {5}, {1}, {1});
                                   })),
              ElementsAre(0, 5, 0));
  const Tensor one =
      read(AttributeProto::FLOAT, "value_float", [](AttributeProto& a) { a.set_f(2.5f); });
  EXPECT_TRUE(one.shape().empty());
  EXPECT_THAT(Elements<float>(one), ElementsAre(2.5f));
  EXPECT_THAT(Elements<int64_t>(
                  read(AttributeProto::INT, "value_int", [](AttributeProto& a) { a.set_i(-3); })),
              ElementsAre(-3));
  const Tensor list = read(AttributeProto::INTS, "value_ints", [](AttributeProto& a) {
    a.add_ints(4);
    a.add_ints(5);
  });
  EXPECT_THAT(list.shape(), ElementsAre(2));
  EXPECT_THAT(Elements<int64_t>(list), ElementsAre(4, 5));
  EXPECT_THAT(Elements<float>(read(AttributeProto::FLOATS, "value_floats",
                                   [](AttributeProto& a) { a.add_floats(6); })),
              ElementsAre(6));
}

TEST(OnnxConstantTest, ConstantNodesOfNoFormAreRefused) {
  const auto with = [](const std::string& name, AttributeProto::AttributeType type, auto&& fill) {
    ModelProto model = SmallModel();
    fill(*AddAttribute(*AddNode(model, "c", "Constant", {}, {"c"}), name, type));
    return model;
  };
  ExpectInvalid(with("value", AttributeProto::INT, [](AttributeProto& a) { a.set_i(1); }),
                {"node 'c' (Constant): attribute 'value': expected TENSOR, got INT"});
  ExpectInvalid(with("val", AttributeProto::INT, [](AttributeProto& a) { a.set_i(1); }),
                {"attribute 'val': is no attribute of Constant"});
  ExpectUnimplemented(
      with("value_string", AttributeProto::STRING, [](AttributeProto& a) { a.set_s("s"); }),
      {"node 'c' (Constant)", "string tensors"});
  ModelProto model = SmallModel();
  auto* node = AddNode(model, "c", "Constant", {}, {"c"});
  ExpectInvalid(model, {"node 'c' (Constant): has 0 attributes, expected one value"});
  AddAttribute(*node, "value_int", AttributeProto::INT)->set_i(1);
  node->add_input("x");
  ExpectInvalid(model, {"has 1 inputs and 1 outputs, expected 0 and 1"});
}

}  // namespace
}  // namespace espalier::formats
