// What lowering refuses, and how it says so; constant folding; Gelus as exporters spell them.
#include <cmath>
#include <functional>

#include "engine/formats/model_config.h"
#include "engine/graph/lowering.h"
#include "engine/graph/ops/elementwise.h"
#include "engine/graph/ops/linear.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/graph/graph_harness.h"

namespace espalier::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Ints = std::vector<int64_t>;

Tensor Random(const Shape& shape, uint32_t seed = 1) {
  int64_t count = 1;
  for (int64_t dim : shape) count *= dim;
  return MakeTensor(DType::kFloat32, shape, RandomData(count, seed));
}

formats::ModelGraph OneNode(const std::string& op, const Shape& x,
                            std::vector<std::string> inputs = {"x"},
                            const Attributes& attributes = {}) {
  formats::ModelGraph graph = MakeGraph(x);
  graph.nodes.push_back(MakeNode(op, std::move(inputs), {"y"}, attributes));
  return graph;
}

void ExpectRefused(formats::ModelGraph graph, int64_t max_batch, absl::StatusCode code,
                   const std::string& text) {
  const absl::Status status = LowerStatus(std::move(graph), max_batch);
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("test.onnx"), HasSubstr(text)));
}

TEST(LoweringTest, AnUnknownOpNamesFileNodeOpAndWhatIsSupported) {
  formats::ModelGraph graph = OneNode("Conv", {kBatch, 3});
  const absl::Status status = LowerStatus(std::move(graph), 4);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("test.onnx: node 'y_node' (Conv)"),
                                                   HasSubstr("Gemm"), HasSubstr("Transpose")));
}

TEST(LoweringTest, AnOpOfAnotherDomainIsRefusedEvenWhenItsNameIsKnown) {
  formats::ModelGraph graph = OneNode("Relu", {kBatch, 3});
  graph.nodes[0].domain = "com.example";
  ExpectRefused(std::move(graph), 4, absl::StatusCode::kUnimplemented, "com.example");
}

TEST(LoweringTest, AnOpsetBeforeTheFirstIsRefusedWithTheRange) {
  formats::ModelGraph graph = OneNode("Gelu", {kBatch, 3});
  graph.opset = 19;
  ExpectRefused(std::move(graph), 4, absl::StatusCode::kUnimplemented, "only 20 and newer");
}

TEST(LoweringTest, AnAttributeThatNobodyReadsIsRefused) {
  ExpectRefused(OneNode("Relu", {kBatch, 3}, {"x"}, {{"alpha", 0.1f}}), 4,
                absl::StatusCode::kUnimplemented, "attribute 'alpha'");
}

TEST(LoweringTest, AnAttributeOfAnotherTypeIsRefused) {
  ExpectRefused(OneNode("Softmax", {kBatch, 3}, {"x"}, {{"axis", 1.0f}}), 4,
                absl::StatusCode::kInvalidArgument, "attribute 'axis' is not of type INT");
}

TEST(LoweringTest, NodesThatNoOutputNeedsAreNotLookedAt) {
  formats::ModelGraph graph = OneNode("Relu", {kBatch, 3});
  graph.nodes.push_back(MakeNode("NonMaxSuppression", {"x"}, {"unused"}));
  graph.initializers.emplace("unused_weight", Random({64, 64}));
  auto program = graph::Lower(std::move(graph), {.max_batch_size = 4});
  ASSERT_TRUE(program.ok()) << program.status();
  EXPECT_EQ(program->steps.size(), 1u);
  EXPECT_TRUE(program->weights.empty());
}

TEST(LoweringTest, OpsThatMixTheItemsOfABatchAreRefusedOnlyWhenBatching) {
  const auto mixing = [](const Shape& x) {
    std::vector<formats::ModelGraph> graphs;
    graphs.push_back(OneNode("Softmax", x, {"x"}, {{"axis", int64_t{0}}}));
    graphs.push_back(OneNode("Transpose", x));
    graphs.push_back(OneNode("Flatten", x, {"x"}, {{"axis", int64_t{0}}}));
    graphs.push_back(OneNode("Flatten", x, {"x"}, {{"axis", int64_t{2}}}));
    for (const std::vector<double>& to : {std::vector<double>{-1, 3}, {4, 6}, {6, -1}, {24}}) {
      graphs.push_back(OneNode("Reshape", x, {"x", "shape"}));
      graphs.back().initializers.emplace(
          "shape", MakeTensor(DType::kInt64, {static_cast<int64_t>(to.size())}, to));
    }
    graphs.push_back(OneNode("Add", x, {"x", "c"}));
    graphs.back().initializers.emplace("c", Random({4, 2, 3}));
    graphs.push_back(OneNode("Mul", x, {"x", "c"}));
    graphs.back().initializers.emplace("c", Random({1, 1, 1, 1}));
    graphs.push_back(OneNode("LayerNormalization", x, {"x", "c"}, {{"axis", int64_t{0}}}));
    graphs.back().initializers.emplace("c", Random({3}));
    return graphs;
  };
  for (formats::ModelGraph& graph : mixing({kBatch, 2, 3})) {
    const std::string op = graph.nodes[0].op_type;
    const absl::Status status = LowerStatus(std::move(graph), 4);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << op << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("batch")) << op;
  }
  for (formats::ModelGraph& graph : mixing({4, 2, 3})) {
    const std::string op = graph.nodes[0].op_type;
    EXPECT_TRUE(LowerStatus(std::move(graph), 0).ok()) << op;
  }
}

TEST(LoweringTest, ShapesThatDoNotFitNameBoth) {
  formats::ModelGraph gemm = OneNode("Gemm", {kBatch, 6}, {"x", "w"});
  gemm.initializers.emplace("w", Random({5, 7}));
  ExpectRefused(std::move(gemm), 4, absl::StatusCode::kInvalidArgument, "[5, 7]");
  formats::ModelGraph product = OneNode("MatMul", {kBatch, 2, 6}, {"x", "w"});
  product.initializers.emplace("w", Random({5, 7}));
  ExpectRefused(std::move(product), 4, absl::StatusCode::kInvalidArgument, "[-1, 2, 6] and [5, 7]");
  formats::ModelGraph sum = OneNode("Add", {kBatch, 6}, {"x", "c"});
  sum.initializers.emplace("c", Random({5}));
  ExpectRefused(std::move(sum), 4, absl::StatusCode::kInvalidArgument, "[-1, 6] and [5]");
  formats::ModelGraph bias = OneNode("Gemm", {kBatch, 6}, {"x", "w", "c"});
  bias.initializers.emplace("w", Random({6, 1}));
  bias.initializers.emplace("c", Random({1, 4}));
  ExpectRefused(std::move(bias), 4, absl::StatusCode::kInvalidArgument, "does not broadcast");
  formats::ModelGraph reshape = OneNode("Reshape", {kBatch, 6}, {"x", "shape"});
  reshape.initializers.emplace("shape", MakeTensor(DType::kInt64, {3}, {0, 4, -1}));
  ExpectRefused(std::move(reshape), 4, absl::StatusCode::kInvalidArgument,
                "cannot reshape [-1, 6] to [0, 4, -1]");
}

TEST(LoweringTest, ProductsOfTwoRuntimeValuesAndWeightsOnTheLeftAreRefused) {
  formats::ModelGraph dynamic = OneNode("MatMul", {kBatch, 6, 6}, {"x", "x"});
  ExpectRefused(std::move(dynamic), 4, absl::StatusCode::kUnimplemented, "constant weights only");
  formats::ModelGraph left = OneNode("MatMul", {kBatch, 6, 6}, {"w", "x"});
  left.initializers.emplace("w", Random({6, 6}));
  ExpectRefused(std::move(left), 4, absl::StatusCode::kUnimplemented, "'w' is on the left");
}

TEST(LoweringTest, TypesThatCannotBeComputedWithAreRefused) {
  formats::ModelGraph ints = MakeGraph({kBatch, 3}, DType::kInt64);
  ints.nodes.push_back(MakeNode("Relu", {"x"}, {"y"}));
  ExpectRefused(std::move(ints), 4, absl::StatusCode::kUnimplemented, "INT64");
  formats::ModelGraph doubles = MakeGraph({kBatch, 3}, DType::kFloat64);
  doubles.nodes.push_back(MakeNode("Softmax", {"x"}, {"y"}));
  ExpectRefused(std::move(doubles), 4, absl::StatusCode::kUnimplemented, "FP64");
  formats::ModelGraph mixed = OneNode("Add", {kBatch, 3}, {"x", "c"});
  mixed.initializers.emplace("c", MakeTensor(DType::kFloat16, {3}, {1, 2, 3}));
  ExpectRefused(std::move(mixed), 4, absl::StatusCode::kInvalidArgument, "FP32 and FP16");
  formats::ModelGraph strings = MakeGraph({kBatch, 3}, DType::kBytes);
  strings.nodes.push_back(MakeNode("Identity", {"x"}, {"y"}));
  ExpectRefused(std::move(strings), 4, absl::StatusCode::kUnimplemented, "strings");
}

TEST(LoweringTest, OptionalOutputsAndTrainingModeAreRefused) {
  formats::ModelGraph norm = OneNode("LayerNormalization", {kBatch, 3}, {"x", "s"});
  norm.initializers.emplace("s", Random({3}));
  norm.nodes[0].outputs.push_back("mean");
  ExpectRefused(std::move(norm), 4, absl::StatusCode::kUnimplemented, "'mean'");
  formats::ModelGraph dropout = OneNode("Dropout", {kBatch, 3}, {"x", "", "training"});
  dropout.initializers.emplace("training", MakeTensor(DType::kBool, {}, {1}));
  ExpectRefused(std::move(dropout), 4, absl::StatusCode::kUnimplemented, "training_mode");
}

TEST(LoweringTest, TheBatchDimensionAndMaxBatchSizeMustAgree) {
  ExpectRefused(OneNode("Relu", {8, 3}), 4, absl::StatusCode::kInvalidArgument,
                "max_batch_size is 4");
  ExpectRefused(OneNode("Relu", {kBatch, 3}), 0, absl::StatusCode::kInvalidArgument,
                "set max_batch_size");
  ExpectRefused(OneNode("Relu", {kBatch, kBatch}), 4, absl::StatusCode::kUnimplemented,
                "dimension 1");
  ExpectRefused(OneNode("Relu", {kBatch, 0}), 4, absl::StatusCode::kUnimplemented, "dimension 1");
}

TEST(LoweringTest, WhatMixesTheItemsOfABatchRunsWhenTheAdviceIsFollowed) {
  const auto with_constant = [](formats::ModelGraph graph, const Shape& shape) {
    graph.initializers.emplace("c", Random(shape));
    return graph;
  };
  const auto reshape = [](const Shape& x) {
    formats::ModelGraph graph = OneNode("Reshape", x, {"x", "shape"});
    graph.initializers.emplace("shape", MakeTensor(DType::kInt64, {2}, {2, -1}));
    return graph;
  };
  const std::function<formats::ModelGraph(int64_t)> builds[] = {
      [&](int64_t first) {
        return with_constant(OneNode("Add", {first, 3}, {"x", "c"}), {4, 3});
      },
      [&](int64_t first) {
        return with_constant(OneNode("Add", {first, 3}, {"x", "c"}), {2, 4, 3});
      },
      [](int64_t first) {
        return OneNode("Transpose", {first, 3});
      },
      [](int64_t first) {
        return OneNode("Softmax", {first, 3}, {"x"}, {{"axis", int64_t{0}}});
      },
      [](int64_t first) {
        return OneNode("Flatten", {first, 3}, {"x"}, {{"axis", int64_t{0}}});
      },
      [&](int64_t first) {
        return reshape({first, 3});
      },
      [&](int64_t first) {
        return with_constant(
            OneNode("LayerNormalization", {first, 3}, {"x", "c"}, {{"axis", int64_t{0}}}), {4, 3});
      }};
  for (const auto& build : builds) {
    ExpectRefused(build(kBatch), 4, absl::StatusCode::kUnimplemented,
                  std::string(graph::kRunAsItIs));
    // As a server completes the configuration of such a model, with nothing or 0 in it.
    const auto config = formats::CompleteModelConfig({}, "m", build(4));
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->max_batch_size(), 0);
    ExpectMatchesReference([&] { return build(4); }, config->max_batch_size());
  }
}

TEST(LoweringTest, HugeShapesAreRefusedBeforeMemoryIsReserved) {
  ExpectRefused(OneNode("Relu", {kBatch, int64_t{1} << 31}), 4,
                absl::StatusCode::kResourceExhausted, "lower max_batch_size");
  ExpectRefused(OneNode("Relu", {kBatch, int64_t{1} << 40, int64_t{1} << 40}), 4,
                absl::StatusCode::kInvalidArgument, "2^62");
  formats::ModelGraph outer = OneNode("Add", {kBatch, 1 << 20, 1}, {"x", "c"});
  outer.initializers.emplace("c", Random({1 << 20}));
  ExpectRefused(std::move(outer), 4, absl::StatusCode::kResourceExhausted, "value 'y'");
}

TEST(LoweringTest, DeclaredOutputsMustMatchWhatIsComputed) {
  formats::ModelGraph graph = OneNode("Relu", {kBatch, 3});
  graph.outputs[0].shape = {kBatch, 4};
  ExpectRefused(std::move(graph), 4, absl::StatusCode::kInvalidArgument, "declared FP32 [-1, 4]");
  graph = OneNode("Relu", {kBatch, 3});
  graph.outputs[0].dtype = DType::kFloat16;
  ExpectRefused(std::move(graph), 4, absl::StatusCode::kInvalidArgument, "declared FP16");
  graph = OneNode("Relu", {kBatch, 3});
  graph.outputs[0].shape = {kBatch, 3};
  EXPECT_TRUE(LowerStatus(std::move(graph), 4).ok());
}

TEST(LoweringTest, NamesThatClashOrAreMissingAreRefused) {
  formats::ModelGraph graph = OneNode("Relu", {kBatch, 3});
  graph.nodes.push_back(MakeNode("Tanh", {"x"}, {"y"}));
  ExpectRefused(std::move(graph), 4, absl::StatusCode::kInvalidArgument, "already produced");
  ExpectRefused(OneNode("Relu", {kBatch, 3}, {"z"}), 4, absl::StatusCode::kInvalidArgument,
                "'z' is not produced");
  graph = OneNode("Relu", {kBatch, 3});
  graph.initializers.emplace("x", Random({3}));
  ExpectRefused(std::move(graph), 4, absl::StatusCode::kInvalidArgument, "defined twice");
  ExpectRefused(OneNode("Add", {kBatch, 3}, {"x"}), 4, absl::StatusCode::kInvalidArgument,
                "input 1 is missing");
  ExpectRefused(OneNode("Gemm", {kBatch, 3}, {"x", ""}), 4, absl::StatusCode::kInvalidArgument,
                "input 1 is missing");
  graph = MakeGraph({kBatch, 3});
  ExpectRefused(std::move(graph), 4, absl::StatusCode::kInvalidArgument,
                "output 'y' is not produced");
}

TEST(LoweringTest, AnOutputThatIsConstantIsRefused) {
  formats::ModelGraph graph = MakeGraph({kBatch, 3});
  graph.initializers.emplace("y", Random({1, 3}));
  ExpectRefused(std::move(graph), 4, absl::StatusCode::kUnimplemented,
                "does not depend on any input");
}

TEST(OutputTest, OneValueMayBeSeveralOutputsAndAnInputMayBeAnOutput) {
  ExpectMatchesReference([] {
    formats::ModelGraph graph = OneNode("Tanh", {kBatch, 5});
    graph.nodes.push_back(MakeNode("Identity", {"y"}, {"same"}));
    graph.nodes.push_back(MakeNode("Relu", {"same"}, {"more"}));
    graph.outputs.push_back({"same", DType::kFloat32, {}});
    graph.outputs.push_back({"more", DType::kFloat32, {}});
    graph.outputs.push_back({"x", DType::kFloat32, {kBatch, 5}});
    return graph;
  });
}

TEST(FoldTest, ConstantsOfEveryKindOfOpAreFolded) {
  ExpectMatchesReference([] {
    formats::ModelGraph graph = MakeGraph({kBatch, 6});
    graph.initializers.emplace("a", Random({5, 4}, 1));
    graph.initializers.emplace("b", Random({6, 4}, 2));
    graph.initializers.emplace("s", Random({6}, 3));
    graph.initializers.emplace("shape", MakeTensor(DType::kInt64, {2}, {-1, 5}));
    graph.nodes.push_back(MakeNode("Gemm", {"b", "a"}, {"w"}, {{"transB", int64_t{1}}}));  // [6, 5]
    graph.nodes.push_back(MakeNode("Tanh", {"w"}, {"t"}));
    graph.nodes.push_back(MakeNode("Reshape", {"t", "shape"}, {"r"}));
    graph.nodes.push_back(MakeNode("Transpose", {"r"}, {"rt"}));
    graph.nodes.push_back(MakeNode("Mul", {"rt", "s"}, {"m"}));  // [5, 6] x [6]
    graph.nodes.push_back(MakeNode("Softmax", {"m"}, {"p"}));
    graph.nodes.push_back(MakeNode("Gemm", {"x", "p"}, {"y"}, {{"transB", int64_t{1}}}));
    return graph;
  });
}

TEST(FoldTest, OnlyTheLayerItselfIsLeftAtRunTime) {
  formats::ModelGraph graph = MakeGraph({kBatch, 6});
  graph.initializers.emplace("w", Random({5, 6}));
  graph.nodes.push_back(MakeNode("Transpose", {"w"}, {"wt"}));
  graph.nodes.push_back(MakeNode("Cast", {"wt"}, {"half"}, {{"to", int64_t{10}}}));
  graph.nodes.push_back(MakeNode("Cast", {"half"}, {"back"}, {{"to", int64_t{1}}}));
  graph.nodes.push_back(MakeNode("MatMul", {"x", "back"}, {"y"}));
  const Tensor original = Random({5, 6});
  auto program = graph::Lower(std::move(graph), {.max_batch_size = 4});
  ASSERT_TRUE(program.ok()) << program.status();
  ASSERT_EQ(program->steps.size(), 1u);
  ASSERT_EQ(program->weights.size(), 1u);
  for (int64_t i = 0; i < original.elements(); ++i) {
    EXPECT_EQ(program->weights[0].tensor->As<float>()[i],
              Float16ToFloat(FloatToFloat16(original.As<float>()[i])));
  }
}

TEST(FoldTest, IntegersAreMovedExactly) {
  formats::ModelGraph graph = MakeGraph({kBatch, 6});
  const int64_t big = (int64_t{1} << 53) + 1;  // lost by any float on the way
  graph.initializers.emplace("shape", MakeTensor(DType::kInt64, {1, 2}, {0, 0}));
  graph.initializers.at("shape").As<int64_t>()[0] = 0;
  graph.initializers.at("shape").As<int64_t>()[1] = big;
  graph.initializers.emplace("one", MakeTensor(DType::kInt64, {1}, {-1}));
  graph.nodes.push_back(MakeNode("Transpose", {"shape"}, {"t"}));
  graph.nodes.push_back(MakeNode("Reshape", {"t", "one"}, {"s"}));
  graph.nodes.push_back(MakeNode("Reshape", {"x", "s"}, {"y"}));
  ExpectRefused(std::move(graph), 4, absl::StatusCode::kInvalidArgument, "9007199254740993");
}

TEST(FoldTest, FoldingIsCapped) {
  formats::ModelGraph graph = MakeGraph({kBatch, 6});
  graph.initializers.emplace("a", Random({1 << 17, 1}));
  graph.initializers.emplace("b", Random({1, 1 << 12}));
  graph.nodes.push_back(MakeNode("Add", {"a", "b"}, {"c"}));  // 2 GiB
  graph.nodes.push_back(MakeNode("Add", {"x", "c"}, {"y"}));
  ExpectRefused(std::move(graph), 4, absl::StatusCode::kResourceExhausted, "before");
}

TEST(FoldTest, AConstantNodeIsAConstant) {
  ExpectMatchesReference([] {
    formats::ModelGraph graph = MakeGraph({kBatch, 6});
    graph.nodes.push_back(MakeNode("Constant", {}, {"c"}));
    graph.nodes[0].attributes.emplace("value", Random({6}, 9));
    graph.nodes.push_back(MakeNode("Mul", {"x", "c"}, {"y"}));
    return graph;
  });
  formats::ModelGraph graph = MakeGraph({kBatch, 6});
  graph.nodes.push_back(MakeNode("Constant", {}, {"c"}, {{"value_ints", Ints{0, 2, 3}}}));
  graph.nodes.push_back(MakeNode("Reshape", {"x", "c"}, {"r"}));
  graph.nodes.push_back(MakeNode("Constant", {}, {"f"}, {{"value_float", 2.0f}}));
  graph.nodes.push_back(MakeNode("Mul", {"r", "f"}, {"y"}));
  auto program = graph::Lower(std::move(graph), {.max_batch_size = 4});
  ASSERT_TRUE(program.ok()) << program.status();
  EXPECT_EQ(program->outputs[0].shape, (Shape{kBatch, 2, 3}));
}

// x · ½ · (1 + f(x)) in the three ways to associate it.
formats::ModelGraph SpelledGelu(const std::string& f, int association) {
  formats::ModelGraph graph = MakeGraph({kBatch, 33});
  graph.opset = 13;
  const auto scalar = [&](const std::string& name, double value) {
    graph.initializers.emplace(name, MakeTensor(DType::kFloat32, {}, {value}));
  };
  scalar("half", 0.5);
  scalar("one", 1);
  scalar("sqrt2", 1.4142135381698608);
  scalar("three", 3);
  scalar("cubic", 0.044715);
  scalar("scale", 0.7978845608);
  const auto add = [&](const std::string& op, std::vector<std::string> in, const std::string& out) {
    graph.nodes.push_back(MakeNode(op, std::move(in), {out}));
  };
  if (f == "Erf") {
    add("Div", {"x", "sqrt2"}, "argument");
  } else {
    if (association == 0) {
      add("Pow", {"x", "three"}, "x3");
    } else {
      add("Mul", {"x", "x"}, "x2");
      add("Mul", {"x2", "x"}, "x3");
    }
    add("Mul", {"cubic", "x3"}, "c");
    add("Add", {"x", "c"}, "s");
    add("Mul", {"s", "scale"}, "argument");
  }
  add(f, {"argument"}, "f");
  add("Add", {"f", "one"}, "a");
  if (association == 0) {
    add("Mul", {"x", "a"}, "p");
    add("Mul", {"p", "half"}, "y");
  } else if (association == 1) {
    add("Mul", {"half", "x"}, "p");
    add("Mul", {"p", "a"}, "y");
  } else {
    add("Mul", {"a", "half"}, "p");
    add("Mul", {"x", "p"}, "y");
  }
  return graph;
}

TEST(PatternTest, SpelledOutGelusBecomeOneStep) {
  for (const char* f : {"Erf", "Tanh"}) {
    for (int association = 0; association < 3; ++association) {
      auto program = graph::Lower(SpelledGelu(f, association), {.max_batch_size = 4});
      ASSERT_TRUE(program.ok()) << program.status();
      EXPECT_EQ(program->steps.size(), 1u) << Listing(*program);
      ExpectMatchesReference([=] { return SpelledGelu(f, association); });
    }
  }
}

TEST(PatternTest, WhatOnlyLooksLikeAGeluIsLeftAlone) {
  formats::ModelGraph graph = SpelledGelu("Erf", 0);
  graph.initializers.at("sqrt2").As<float>()[0] = 1.5f;
  ExpectRefused(std::move(graph), 4, absl::StatusCode::kUnimplemented, "(Erf)");
  graph = SpelledGelu("Tanh", 1);
  graph.initializers.at("half").As<float>()[0] = 0.6f;
  auto program = graph::Lower(std::move(graph), {.max_batch_size = 4});
  ASSERT_TRUE(program.ok()) << program.status();
  EXPECT_GT(program->steps.size(), 5u);
}

TEST(PatternTest, AMillionFactorsDoNotHang) {
  formats::ModelGraph graph = MakeGraph({kBatch, 2});
  std::string last = "x";
  for (int i = 0; i < 60; ++i) {
    const std::string name = i == 59 ? "y" : "v" + std::to_string(i);
    graph.nodes.push_back(MakeNode("Mul", {last, last}, {name}));  // x^(2^60)
    last = name;
  }
  EXPECT_TRUE(LowerStatus(std::move(graph), 4).ok());
}

TEST(WeightTest, OneInitializerUsedTwiceIsOneWeight) {
  formats::ModelGraph graph = MakeGraph({kBatch, 6});
  graph.initializers.emplace("w", Random({6, 6}));
  graph.nodes.push_back(MakeNode("MatMul", {"x", "w"}, {"h"}));
  graph.nodes.push_back(MakeNode("MatMul", {"h", "w"}, {"y"}));
  auto program = graph::Lower(std::move(graph), {.max_batch_size = 4});
  ASSERT_TRUE(program.ok()) << program.status();
  EXPECT_EQ(program->weights.size(), 1u);
  EXPECT_EQ(program->linears.size(), 2u);
}

}  // namespace
}  // namespace espalier::testing
