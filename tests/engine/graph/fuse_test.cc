// Which steps move into a linear layer, and that nothing computes anything else for it.
#include "engine/graph/fuse.h"

#include "engine/graph/arena_layout.h"
#include "engine/graph/ops/linear.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/graph/graph_harness.h"

namespace espalier::testing {
namespace {

using ::testing::ElementsAre;

Tensor Random(const Shape& shape, uint32_t seed = 1) {
  int64_t count = 1;
  for (int64_t dim : shape) count *= dim;
  return MakeTensor(DType::kFloat32, shape, RandomData(count, seed));
}

formats::ModelGraph TwoLayers(const std::string& activation) {
  formats::ModelGraph graph = MakeGraph({kBatch, 3, 6});
  graph.initializers.emplace("w1", Random({6, 5}, 1));
  graph.initializers.emplace("b1", Random({5}, 2));
  graph.initializers.emplace("w2", Random({5, 4}, 3));
  graph.initializers.emplace("b2", Random({}, 4));
  graph.nodes.push_back(MakeNode("MatMul", {"x", "w1"}, {"m1"}));
  graph.nodes.push_back(MakeNode("Add", {"b1", "m1"}, {"a1"}));
  graph.nodes.push_back(MakeNode(activation, {"a1"}, {"h"}));
  graph.nodes.push_back(MakeNode("MatMul", {"h", "w2"}, {"m2"}));
  graph.nodes.push_back(MakeNode("Add", {"m2", "b2"}, {"y"}));
  return graph;
}

TEST(FuseTest, BiasAndActivationMoveIntoTheLayer) {
  for (const char* activation : {"Relu", "Gelu", "Sigmoid", "Tanh"}) {
    auto program = graph::Lower(TwoLayers(activation), {.max_batch_size = 4});
    ASSERT_TRUE(program.ok()) << program.status();
    ASSERT_EQ(program->steps.size(), 2u) << Listing(*program);
    ASSERT_EQ(program->linears.size(), 2u);
    EXPECT_NE(program->linears[0]->activation(), kernels::Activation::kNone);
    EXPECT_EQ(program->steps[0].inputs.size(), 2u);
    EXPECT_EQ(program->steps[1].inputs.size(), 2u);
    EXPECT_EQ(program->linears[0]->tokens_per_item(), 3);
    ExpectMatchesReference([=] { return TwoLayers(activation); });
  }
}

TEST(FuseTest, AValueThatIsUsedTwiceOrIsAnOutputIsNotFusedAway) {
  const auto build = [] {
    formats::ModelGraph graph = MakeGraph({kBatch, 6});
    graph.initializers.emplace("w", Random({6, 6}));
    graph.initializers.emplace("b", Random({6}, 2));
    graph.nodes.push_back(MakeNode("MatMul", {"x", "w"}, {"m"}));
    graph.nodes.push_back(MakeNode("Add", {"m", "b"}, {"a"}));
    graph.nodes.push_back(MakeNode("Relu", {"a"}, {"r"}));
    graph.nodes.push_back(MakeNode("Add", {"r", "m"}, {"y"}));
    graph.outputs.push_back({"a", DType::kFloat32, {}});
    return graph;
  };
  auto program = graph::Lower(build(), {.max_batch_size = 4});
  ASSERT_TRUE(program.ok()) << program.status();
  EXPECT_EQ(program->steps.size(), 4u) << Listing(*program);
  ExpectMatchesReference(build);
}

TEST(FuseTest, OnlyARowOfTheOutputWidthIsABias) {
  const auto build = [](const Shape& c) {
    return [c] {
      formats::ModelGraph graph = MakeGraph({kBatch, 5, 6});
      graph.initializers.emplace("w", Random({6, 5}));
      graph.initializers.emplace("c", Random(c, 2));
      graph.nodes.push_back(MakeNode("MatMul", {"x", "w"}, {"m"}));
      graph.nodes.push_back(MakeNode("Add", {"m", "c"}, {"y"}));
      return graph;
    };
  };
  for (const auto& [shape, steps] : std::map<Shape, size_t>{{{5}, 1},
                                                            {{1}, 1},
                                                            {{1, 5}, 1},
                                                            {{1, 1, 5}, 1},
                                                            {{5, 1}, 2},
                                                            {{5, 5}, 2},
                                                            {{1, 5, 5}, 2},
                                                            {{1, 5, 1}, 2}}) {
    auto program = graph::Lower(build(shape)(), {.max_batch_size = 4});
    ASSERT_TRUE(program.ok()) << program.status();
    EXPECT_EQ(program->steps.size(), steps) << ToString(shape);
    ExpectMatchesReference(build(shape));
  }
}

// --- residuals -------------------------------------------------------------------------------------

// What each step is, in order: the epilogue of linear layers, the op of the file's node of others.
std::vector<std::string> Kinds(const graph::Program& program) {
  std::vector<std::string> kinds;
  for (const graph::Step& step : program.steps) {
    const auto* linear = dynamic_cast<const graph::LinearOp*>(step.op.get());
    if (linear == nullptr) {
      kinds.push_back(step.op_type);
      continue;
    }
    kinds.push_back("linear");
    if (linear->bias_input() >= 0) kinds.back() += " bias";
    if (linear->residual_input() >= 0) kinds.back() += " residual";
    if (linear->activation() != kernels::Activation::kNone)
      kinds.back() += std::string(" ") + NameOf(linear->activation());
  }
  return kinds;
}

// Nodes "op: input input -> output" over x [batch, 5, 6], square weights w1, w2, … and a bias row b.
Build GraphOf(std::vector<std::vector<std::string>> nodes, Shape x = {kBatch, 5, 6},
              std::vector<std::string> outputs = {}) {
  return [=] {
    formats::ModelGraph graph = MakeGraph(x);
    for (uint32_t i = 1; i <= 4; ++i)
      graph.initializers.emplace("w" + std::to_string(i), Random({6, 6}, i));
    graph.initializers.emplace("b", Random({6}, 9));
    graph.initializers.emplace("c", Random({5, 6}, 10));
    for (const std::vector<std::string>& node : nodes) {
      graph.nodes.push_back(MakeNode(
          node[0], std::vector<std::string>(node.begin() + 1, node.end() - 1), {node.back()}));
    }
    for (const std::string& output : outputs)
      graph.outputs.push_back({output, DType::kFloat32, {}});
    return graph;
  };
}

std::vector<std::string> KindsOf(const Build& build, int64_t max_batch = 7) {
  auto program = graph::Lower(build(), {.max_batch_size = max_batch});
  EXPECT_TRUE(program.ok()) << program.status();
  if (!program.ok()) return {};
  ExpectMatchesReference(build, max_batch, 1e-5);
  return Kinds(*program);
}

TEST(FuseResidualTest, AnotherValueOnEitherSideMovesIntoTheLayer) {
  EXPECT_THAT(KindsOf(GraphOf({{"MatMul", "x", "w1", "m"}, {"Add", "m", "x", "y"}})),
              ElementsAre("linear residual"));
  EXPECT_THAT(KindsOf(GraphOf({{"MatMul", "x", "w1", "m"}, {"Add", "x", "m", "y"}})),
              ElementsAre("linear residual"));
}

TEST(FuseResidualTest, BiasAndResidualComeInAnyOrderBeforeTheActivation) {
  EXPECT_THAT(KindsOf(GraphOf({{"MatMul", "x", "w1", "m"},
                               {"Add", "m", "b", "a"},
                               {"Add", "x", "a", "s"},
                               {"Gelu", "s", "y"}})),
              ElementsAre("linear bias residual gelu_erf"));
  EXPECT_THAT(KindsOf(GraphOf({{"MatMul", "x", "w1", "m"},
                               {"Add", "m", "x", "s"},
                               {"Add", "b", "s", "a"},
                               {"Tanh", "a", "y"}})),
              ElementsAre("linear bias residual tanh"));
}

TEST(FuseResidualTest, BlocksOfAPerceptronAroundTheirInputAreTwoLayersEach) {
  std::vector<std::vector<std::string>> nodes;
  std::string x = "x";
  for (const std::string block : {"1", "2"}) {
    const std::string last = block == "2" ? "y" : "x" + block;
    nodes.insert(nodes.end(), {{"MatMul", x, "w" + block, "m" + block},
                               {"Gelu", "m" + block, "h" + block},
                               {"MatMul", "h" + block, "w3", "n" + block},
                               {"Add", "n" + block, "b", "a" + block},
                               {"Add", x, "a" + block, last}});
    x = last;
  }
  EXPECT_THAT(KindsOf(GraphOf(nodes)), ElementsAre("linear gelu_erf", "linear bias residual",
                                                   "linear gelu_erf", "linear bias residual"));
}

TEST(FuseResidualTest, ASumThatIsReadTwiceKeepsItsActivationApart) {
  EXPECT_THAT(KindsOf(GraphOf({{"MatMul", "x", "w1", "m"},
                               {"Add", "m", "x", "s"},
                               {"Relu", "s", "r"},
                               {"Mul", "r", "s", "y"}})),
              ElementsAre("linear residual", "Relu", "Mul"));
  EXPECT_THAT(
      KindsOf(GraphOf({{"MatMul", "x", "w1", "m"}, {"Add", "m", "x", "s"}, {"Relu", "s", "y"}},
                      {kBatch, 5, 6}, {"s"})),
      ElementsAre("linear residual", "Relu"));
}

TEST(FuseResidualTest, AProductThatIsAnOutputOrReadElsewhereIsAddedApart) {
  EXPECT_THAT(
      KindsOf(GraphOf({{"MatMul", "x", "w1", "m"}, {"Add", "m", "x", "y"}}, {kBatch, 5, 6}, {"m"})),
      ElementsAre("linear", "Add"));
  EXPECT_THAT(KindsOf(GraphOf({{"MatMul", "x", "w1", "m"}, {"Add", "m", "m", "y"}})),
              ElementsAre("linear", "Add"));
  EXPECT_THAT(
      KindsOf(GraphOf({{"MatMul", "x", "w1", "m"}, {"Tanh", "m", "t"}, {"Add", "m", "t", "y"}})),
      ElementsAre("linear", "Tanh", "Add"))
      << "what is added depends on the layer";
}

TEST(FuseResidualTest, WhatIsAddedAfterTheActivationStaysApart) {
  EXPECT_THAT(
      KindsOf(GraphOf({{"MatMul", "x", "w1", "m"}, {"Relu", "m", "r"}, {"Add", "r", "x", "y"}})),
      ElementsAre("linear relu", "Add"));
}

TEST(FuseResidualTest, OnlySumsAreResiduals) {
  EXPECT_THAT(KindsOf(GraphOf({{"MatMul", "x", "w1", "m"}, {"Sub", "m", "x", "y"}})),
              ElementsAre("linear", "Sub"));
}

TEST(FuseResidualTest, ALayerTakesOneResidual) {
  EXPECT_THAT(KindsOf(GraphOf(
                  {{"MatMul", "x", "w1", "m"}, {"Add", "m", "x", "s"}, {"Add", "s", "x", "y"}})),
              ElementsAre("linear residual", "Add"));
}

TEST(FuseResidualTest, OfTwoLayersThatAreAddedTheLaterTakesTheEarlier) {
  const Build build = GraphOf({{"MatMul", "x", "w1", "m"},
                               {"MatMul", "x", "w2", "n"},
                               {"Add", "n", "m", "s"},
                               {"Relu", "s", "y"}});
  EXPECT_THAT(KindsOf(build), ElementsAre("linear", "linear residual relu"));
  auto program = graph::Lower(build(), {.max_batch_size = 7});
  ASSERT_TRUE(program.ok());
  EXPECT_EQ(program->weights[program->linears[1]->weight()].name, "w2");
}

TEST(FuseResidualTest, ALayerWaitsForAValueThatIsComputedAfterIt) {
  EXPECT_THAT(KindsOf(GraphOf({{"MatMul", "x", "w1", "m"},
                               {"Softmax", "x", "p"},
                               {"Add", "m", "p", "s"},
                               {"Sigmoid", "s", "y"}})),
              ElementsAre("Softmax", "linear residual sigmoid"));
  EXPECT_THAT(KindsOf(GraphOf({{"MatMul", "x", "w1", "m"},
                               {"MatMul", "x", "w2", "n"},
                               {"Relu", "n", "r"},
                               {"Add", "m", "r", "y"}})),
              ElementsAre("linear relu", "linear residual"));
}

TEST(FuseResidualTest, WhatBroadcastsIsAddedApart) {
  // The other value, and the product, is spread over the second dimension.
  EXPECT_THAT(
      KindsOf(GraphOf({{"Flatten", "x", "x2"}, {"MatMul", "x", "w1", "m"}, {"Add", "m", "x", "y"}},
                      {kBatch, 1, 6})),
      ElementsAre("linear residual"))
      << "a dimension of one is none to spread over";
  const auto build = [](bool product_is_small) {
    return [=] {
      formats::ModelGraph graph = MakeGraph({kBatch, 5, 6});
      graph.inputs.push_back({"z", DType::kFloat32, {kBatch, 1, 6}});
      graph.initializers.emplace("w", Random({6, 6}));
      graph.nodes.push_back(MakeNode("MatMul", {product_is_small ? "z" : "x", "w"}, {"m"}));
      graph.nodes.push_back(MakeNode("Add", {"m", product_is_small ? "x" : "z"}, {"y"}));
      return graph;
    };
  };
  EXPECT_THAT(KindsOf(build(false)), ElementsAre("linear", "Add"));
  EXPECT_THAT(KindsOf(build(true)), ElementsAre("linear", "Add"));
}

TEST(FuseResidualTest, AConstantOfTheWholeShapeIsAddedApart) {
  EXPECT_THAT(KindsOf(GraphOf({{"MatMul", "x", "w1", "m"}, {"Add", "m", "c", "y"}}, {5, 6}), 0),
              ElementsAre("linear", "Add"));
}

TEST(FuseResidualTest, TheSumTakesTheMemoryOfAResidualThatEndsThere) {
  // t is the residual of a layer on s and dies with it: y of the layer lies where it lay.
  const Build chain = GraphOf({{"Tanh", "x", "t"},
                               {"Softmax", "x", "s"},
                               {"MatMul", "s", "w1", "m"},
                               {"Add", "m", "t", "a"},
                               {"Softmax", "a", "y"}});
  EXPECT_THAT(KindsOf(chain), ElementsAre("Tanh", "Softmax", "linear residual", "Softmax"));
  auto program = graph::Lower(chain(), {.max_batch_size = 7});
  ASSERT_TRUE(program.ok());
  graph::ArenaLayout layout = graph::PlanArena(*program, 7);
  EXPECT_EQ(layout.offsets[program->steps[2].output], layout.offsets[program->steps[0].output]);
  // The same with a form of its own, which only a GPU has, and with a pair's x in that memory.
  graph::Value& residual = program->values[program->steps[0].output];
  residual.width = 6, residual.row_stride = 64;
  layout = graph::PlanArena(*program, 7);
  EXPECT_NE(layout.offsets[program->steps[2].output], layout.offsets[program->steps[0].output]);
  residual.width = residual.row_stride = 0;
  program->steps[2].keeps = {program->steps[0].output};
  layout = graph::PlanArena(*program, 7);
  EXPECT_NE(layout.offsets[program->steps[2].output], layout.offsets[program->steps[0].output]);
}

TEST(FuseResidualTest, TheSumLeavesTheMemoryOfAResidualThatIsTheLayersInput) {
  const Build build = GraphOf({{"Tanh", "x", "t"},
                               {"MatMul", "t", "w1", "m"},
                               {"Add", "m", "t", "a"},
                               {"Softmax", "a", "y"}});
  EXPECT_THAT(KindsOf(build), ElementsAre("Tanh", "linear residual", "Softmax"));
  auto program = graph::Lower(build(), {.max_batch_size = 7});
  ASSERT_TRUE(program.ok());
  const graph::ArenaLayout layout = graph::PlanArena(*program, 7);
  EXPECT_NE(layout.offsets[program->steps[1].output], layout.offsets[program->steps[0].output]);
}

}  // namespace
}  // namespace espalier::testing
