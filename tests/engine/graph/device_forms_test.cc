#include "engine/graph/device_forms.h"

#include <numeric>

#include "engine/graph/linear_pairs.h"
#include "engine/graph/ops/cast.h"
#include "engine/graph/ops/linear.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/graph/graph_harness.h"

namespace espalier::graph {
namespace {

using namespace espalier::testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;

// x [batch, in] through Gemm layers of these widths with `op` between them.
Program MakeProgram(const std::vector<int64_t>& widths, const std::string& op, DType compute,
                    DType io = DType::kFloat32) {
  formats::ModelGraph graph = MakeGraph({kBatch, widths[0]}, io);
  std::string last = "x";
  for (size_t i = 1; i < widths.size(); ++i) {
    const std::string n = std::to_string(i);
    graph.initializers.emplace(
        "w" + n, MakeTensor(io, {widths[i], widths[i - 1]},
                            RandomData(widths[i] * widths[i - 1], static_cast<uint32_t>(i))));
    const bool is_last = i + 1 == widths.size();
    graph.nodes.push_back(
        MakeNode("Gemm", {last, "w" + n}, {is_last ? "y" : "g" + n}, {{"transB", int64_t{1}}}));
    if (is_last) break;
    graph.nodes.push_back(MakeNode(op, {"g" + n}, {"h" + n}));
    last = "h" + n;
  }
  auto program = Lower(std::move(graph), {.max_batch_size = 4});
  EXPECT_TRUE(program.ok()) << program.status();
  PrepareForDevice(*program, compute);
  return *std::move(program);
}

// "cast", "linear" and "other" in the order of the steps.
std::vector<std::string> KindsOf(const Program& program) {
  std::vector<std::string> kinds;
  for (const Step& step : program.steps) {
    kinds.push_back(dynamic_cast<const CastOp*>(step.op.get())     ? "cast"
                    : dynamic_cast<const LinearOp*>(step.op.get()) ? "linear"
                                                                   : "other");
  }
  return kinds;
}

const Value& Output(const Program& program, int step) {
  return program.values[program.steps[step].output];
}

TEST(DeviceFormsTest, LinearLayersPassRowsAtAStrideOf64) {
  const Program program = MakeProgram({784, 100, 48}, "Relu", DType::kFloat32);
  EXPECT_THAT(KindsOf(program), ElementsAre("linear", "linear"));
  EXPECT_EQ(Output(program, 0).width, 100);
  EXPECT_EQ(Output(program, 0).row_stride, 128);
  EXPECT_EQ(BytesOf(Output(program, 0), 3), 3 * 128 * sizeof(float));
  EXPECT_EQ(Output(program, 1).width, 0) << "an output is as the client wants it";
}

TEST(DeviceFormsTest, InputsAndOutputsOfOddWidthAreConverted) {
  const Program program = MakeProgram({785, 64, 10}, "Relu", DType::kFloat32);
  EXPECT_THAT(KindsOf(program), ElementsAre("cast", "linear", "linear", "cast"));
  EXPECT_EQ(Output(program, 0).row_stride, 832);
  EXPECT_EQ(Output(program, 2).row_stride, 64);
}

TEST(DeviceFormsTest, FloatsBecomeTheComputeTypeBetweenInputAndOutput) {
  const Program program = MakeProgram({64, 64, 64}, "Relu", DType::kBFloat16);
  EXPECT_THAT(KindsOf(program), ElementsAre("cast", "linear", "linear", "cast"));
  for (int step = 0; step < 3; ++step) EXPECT_EQ(Output(program, step).storage, DType::kBFloat16);
  EXPECT_EQ(Output(program, 3).storage, DType::kFloat32);
}

TEST(DeviceFormsTest, AModelOfTheComputeTypeIsConvertedNowhereElse) {
  const Program program = MakeProgram({64, 100, 64}, "Relu", DType::kBFloat16, DType::kBFloat16);
  EXPECT_THAT(KindsOf(program), ElementsAre("cast", "linear", "linear", "cast"));
  EXPECT_EQ(Output(program, 0).width, 64) << "the conversion writes the rows that the layer reads";
}

TEST(DeviceFormsTest, StepsThatKnowNoRowsGetContiguousValues) {
  const Program even = MakeProgram({64, 48, 64}, "Softmax", DType::kFloat32);
  EXPECT_THAT(KindsOf(even), ElementsAre("linear", "other", "linear"));
  EXPECT_EQ(Output(even, 0).width, 0);
  const Program odd = MakeProgram({64, 50, 64}, "Softmax", DType::kFloat32);
  EXPECT_THAT(KindsOf(odd), ElementsAre("linear", "cast", "other", "cast", "linear"));
  EXPECT_EQ(Output(odd, 0).row_stride, 64);
  EXPECT_EQ(Output(odd, 1).width, 0);
  EXPECT_EQ(Output(odd, 3).row_stride, 64);
}

TEST(LinearPairsTest, NeighboursWithoutAnotherReaderArePairsAndNoLayerIsInTwo) {
  Program program = MakeProgram({64, 128, 64, 128, 64, 8}, "Relu", DType::kBFloat16);
  const std::vector<int> x_of_first = program.steps[1].inputs;  // after the conversion of x
  const std::vector<LinearPair> pairs = PairLinears(program);
  ASSERT_EQ(pairs.size(), 2u);
  EXPECT_EQ(pairs[0].first, 0);
  EXPECT_EQ(pairs[0].second, 1);
  EXPECT_EQ(pairs[1].first, 2);
  EXPECT_EQ(pairs[1].second, 3);
  EXPECT_EQ(program.steps[2].keeps, x_of_first) << "x lives until both have run";
  for (size_t i = 0; i < program.linears.size(); ++i)
    EXPECT_EQ(program.linears[i]->layer(), static_cast<int>(i));
}

// x through layers of these widths; every `block` of them are added to what they compute from, which is as wide.
Program MakeResidualProgram(const std::vector<int64_t>& widths, size_t block, DType compute) {
  formats::ModelGraph graph = MakeGraph({kBatch, widths[0]});
  std::vector<std::string> values = {"x"};
  for (size_t i = 1; i < widths.size(); ++i) {
    const std::string n = std::to_string(i);
    graph.initializers.emplace(
        "w" + n, MakeTensor(DType::kFloat32, {widths[i - 1], widths[i]},
                            RandomData(widths[i] * widths[i - 1], static_cast<uint32_t>(i))));
    const std::string sum = i + 1 == widths.size() ? "y" : "s" + n;
    const bool adds = i % block == 0;
    graph.nodes.push_back(MakeNode("MatMul", {values.back(), "w" + n}, {adds ? "m" + n : sum}));
    if (adds) graph.nodes.push_back(MakeNode("Add", {values[i - block], "m" + n}, {sum}));
    values.push_back(sum);
  }
  auto program = Lower(std::move(graph), {.max_batch_size = 4});
  EXPECT_TRUE(program.ok()) << program.status();
  PrepareForDevice(*program, compute);
  return *std::move(program);
}

TEST(DeviceFormsTest, AResidualLiesInRowsAsWideAsTheOutput) {
  const Program program = MakeResidualProgram({50, 100, 50, 100, 50}, 2, DType::kFloat32);
  EXPECT_THAT(KindsOf(program), ElementsAre("cast", "linear", "linear", "linear", "linear", "cast"))
      << "one conversion of x for both that read it";
  for (const int step : {2, 4}) {
    const auto& linear = static_cast<const LinearOp&>(*program.steps[step].op);
    ASSERT_GT(linear.residual_input(), 0);
    const Value& residual = program.values[program.steps[step].inputs[linear.residual_input()]];
    EXPECT_EQ(residual.width, linear.out());
    EXPECT_EQ(residual.row_stride, linear.out() == 50 ? 64 : 128);
  }
}

TEST(DeviceFormsTest, AResidualOfAnotherTypeIsConverted) {
  const Program program = MakeResidualProgram({64, 128, 64}, 2, DType::kBFloat16);
  EXPECT_THAT(KindsOf(program), ElementsAre("cast", "linear", "linear", "cast"));
  const auto& linear = static_cast<const LinearOp&>(*program.steps[2].op);
  EXPECT_EQ(program.steps[2].inputs[linear.residual_input()], program.steps[0].output);
}

TEST(LinearPairsTest, OnlyTheSecondLayerOfAPairHasAResidual) {
  Program program = MakeResidualProgram({64, 128, 64, 128, 64}, 2, DType::kBFloat16);
  const int x = program.steps[0].output;
  const std::vector<LinearPair> pairs = PairLinears(program);
  ASSERT_EQ(pairs.size(), 2u) << "the layer after a block begins the next";
  EXPECT_EQ(pairs[1].first, 2);
  EXPECT_THAT(program.steps[2].keeps, ElementsAre(x));
  Program each = MakeResidualProgram({64, 64, 64, 64}, 1, DType::kBFloat16);
  EXPECT_TRUE(PairLinears(each).empty());
}

TEST(LinearPairsTest, LayersWithAStepBetweenThemAreNone) {
  Program program = MakeProgram({64, 128, 64}, "Softmax", DType::kBFloat16);
  EXPECT_TRUE(PairLinears(program).empty());
}

}  // namespace
}  // namespace espalier::graph
