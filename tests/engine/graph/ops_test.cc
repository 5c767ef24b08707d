// Every op against its ONNX definition in double (onnx_reference.cc), batched and not, fused and
// not.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/graph/graph_harness.h"

namespace espalier::testing {
namespace {

using Ints = std::vector<int64_t>;

Tensor Floats(const Shape& shape, uint32_t seed = 1, DType dtype = DType::kFloat32) {
  int64_t count = 1;
  for (int64_t dim : shape) count *= dim;
  return MakeTensor(dtype, shape, RandomData(count, seed));
}

Tensor Shape64(const std::vector<double>& dims) {
  return MakeTensor(DType::kInt64, {static_cast<int64_t>(dims.size())}, dims);
}

// A graph of one node with constants c0, c1, …; "x" is its input number `x_at`.
Build OneNode(const std::string& op, const Shape& x, std::vector<std::function<Tensor()>> constants,
              const Attributes& attributes = {}, int64_t opset = 21, size_t x_at = 0) {
  return [=] {
    formats::ModelGraph graph = MakeGraph(x);
    graph.opset = opset;
    std::vector<std::string> inputs;
    for (size_t i = 0; i <= constants.size(); ++i) {
      if (i == x_at) {
        inputs.push_back("x");
        continue;
      }
      const size_t c = i < x_at ? i : i - 1;
      const std::string name = "c" + std::to_string(c);
      graph.initializers.emplace(name, constants[c]());
      inputs.push_back(name);
    }
    graph.nodes.push_back(MakeNode(op, inputs, {"y"}, attributes));
    return graph;
  };
}

std::function<Tensor()> C(const Shape& shape, uint32_t seed = 1, DType dtype = DType::kFloat32) {
  return [=] { return Floats(shape, seed, dtype); };
}

TEST(GemmTest, EveryTransposeScaleAndBiasFormMatches) {
  for (const int64_t trans_b : {0, 1}) {
    for (const float alpha : {1.0f, 0.5f}) {
      for (const float beta : {1.0f, 0.0f, -2.0f}) {
        for (const Shape& c : {Shape{5}, Shape{1, 5}, Shape{1}, Shape{}, Shape{1, 1}}) {
          ExpectMatchesReference(OneNode("Gemm", {kBatch, 6},
                                         {C(trans_b ? Shape{5, 6} : Shape{6, 5}), C(c, 2)},
                                         {{"alpha", alpha}, {"beta", beta}, {"transB", trans_b}}));
        }
      }
    }
  }
  ExpectMatchesReference(OneNode("Gemm", {kBatch, 6}, {C({6, 5})}));
}

TEST(GemmTest, WithoutBatchTheInputMayBeTransposedAndTheBiasAMatrix) {
  ExpectMatchesReference(
      OneNode("Gemm", {6, 4}, {C({6, 5}), C({4, 5}, 2)}, {{"transA", int64_t{1}}}), 0);
  ExpectMatchesReference(OneNode("Gemm", {4, 6}, {C({6, 5}), C({4, 1}, 2)}, {{"beta", 3.0f}}), 0);
}

TEST(GemmTest, ABiasComputedAtRunTimeIsScaledAndAdded) {
  ExpectMatchesReference([] {
    formats::ModelGraph graph = MakeGraph({kBatch, 6});
    graph.initializers.emplace("w", Floats({6, 6}));
    graph.nodes.push_back(MakeNode("Gemm", {"x", "w", "x"}, {"y"}, {{"beta", 0.25f}}));
    return graph;
  });
}

TEST(GemmTest, HalfPrecisionWeightsKeepTheirValues) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    ExpectMatchesReference(
        [=] {
          formats::ModelGraph graph = MakeGraph({kBatch, 6}, dtype);
          graph.initializers.emplace("w", Floats({6, 5}, 1, dtype));
          graph.initializers.emplace("b", Floats({5}, 2, dtype));
          graph.nodes.push_back(MakeNode("Gemm", {"x", "w", "b"}, {"y"}, {{"alpha", 0.3f}}));
          return graph;
        },
        7, dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8);
  }
}

TEST(MatMulTest, LeadingDimensionsAreTokens) {
  ExpectMatchesReference(OneNode("MatMul", {kBatch, 6}, {C({6, 5})}));
  ExpectMatchesReference(OneNode("MatMul", {kBatch, 3, 6}, {C({6, 5})}));
  ExpectMatchesReference(OneNode("MatMul", {kBatch, 2, 3, 6}, {C({6, 1})}));
  ExpectMatchesReference(OneNode("MatMul", {6}, {C({6, 5})}), 0);
  ExpectMatchesReference(OneNode("MatMul", {4, 6}, {C({6, 5})}), 0);
}

TEST(MatMulTest, AVectorOnTheRightDropsTheDimension) {
  ExpectMatchesReference(OneNode("MatMul", {kBatch, 3, 6}, {C({6})}));
  ExpectMatchesReference(OneNode("MatMul", {kBatch, 6}, {C({6})}));
}

TEST(BroadcastTest, ConstantsBroadcastOnEitherSide) {
  for (const char* op : {"Add", "Sub", "Mul", "Div"}) {
    for (const Shape& c :
         {Shape{}, Shape{1}, Shape{5}, Shape{4, 5}, Shape{4, 1}, Shape{3, 4, 5}, Shape{3, 1, 5},
          Shape{1, 3, 4, 5}, Shape{1, 1, 1, 1}, Shape{1, 3, 1, 1}}) {
      const auto constant = [=] {
        Tensor tensor = Floats(c);
        for (int64_t i = 0; i < tensor.elements(); ++i)
          tensor.As<float>()[i] += 2;  // away from 0 / 0
        return tensor;
      };
      ExpectMatchesReference(OneNode(op, {kBatch, 3, 4, 5}, {constant}));
      if (std::string(op) != "Div")
        ExpectMatchesReference(OneNode(op, {kBatch, 3, 4, 5}, {constant}, {}, 21, 1));
    }
  }
}

TEST(BroadcastTest, BothSidesMayGrow) {
  ExpectMatchesReference(OneNode("Add", {kBatch, 1, 5}, {C({4, 1})}));
  ExpectMatchesReference(OneNode("Mul", {kBatch, 3, 1, 5}, {C({1, 1, 4, 1}, 3)}));
  ExpectMatchesReference(OneNode("Mul", {2, 3, 1, 1}, {C({4, 1, 1, 6, 5})}), 0);
  ExpectMatchesReference(OneNode("Sub", {kBatch, 1}, {C({9})}));
}

TEST(BroadcastTest, TwoRuntimeValuesOfOneRankBroadcast) {
  ExpectMatchesReference([] {
    formats::ModelGraph graph = MakeGraph({kBatch, 4, 5});
    graph.inputs.push_back({"z", DType::kFloat32, {kBatch, 1, 5}});
    graph.nodes.push_back(MakeNode("Sub", {"z", "x"}, {"d"}));
    graph.nodes.push_back(MakeNode("Mul", {"d", "d"}, {"y"}));
    return graph;
  });
}

TEST(ActivationTest, EveryActivationMatches) {
  for (const char* op : {"Relu", "Sigmoid", "Tanh", "Gelu"})
    ExpectMatchesReference(OneNode(op, {kBatch, 37}, {}));
  ExpectMatchesReference(OneNode("Gelu", {kBatch, 37}, {}, {{"approximate", std::string("tanh")}}));
  ExpectMatchesReference(OneNode("Relu", {2, 3}, {}), 0);
}

TEST(SoftmaxTest, NewAndOldSemanticsMatchOnEveryAxis) {
  for (const int64_t axis : {1, 2, 3, -1, -2, -3}) {
    ExpectMatchesReference(OneNode("Softmax", {kBatch, 3, 4, 5}, {}, {{"axis", axis}}));
    ExpectMatchesReference(OneNode("Softmax", {kBatch, 3, 4, 5}, {}, {{"axis", axis}}, 11));
  }
  ExpectMatchesReference(OneNode("Softmax", {kBatch, 3, 4}, {}));
  ExpectMatchesReference(OneNode("Softmax", {kBatch, 3, 4}, {}, {}, 12));
  ExpectMatchesReference(OneNode("Softmax", {3, 4}, {}, {{"axis", int64_t{0}}}), 0);
  ExpectMatchesReference(OneNode("Softmax", {3, 4}, {}, {{"axis", int64_t{0}}}, 12), 0);
}

TEST(LayerNormalizationTest, AxesParametersAndMissingBiasMatch) {
  ExpectMatchesReference(OneNode("LayerNormalization", {kBatch, 3, 8}, {C({8}), C({8}, 2)}));
  ExpectMatchesReference(
      OneNode("LayerNormalization", {kBatch, 3, 8}, {C({8})}, {{"epsilon", 0.1f}}));
  ExpectMatchesReference(OneNode("LayerNormalization", {kBatch, 3, 8}, {C({3, 8}), C({8}, 2)},
                                 {{"axis", int64_t{1}}}));
  ExpectMatchesReference(OneNode("LayerNormalization", {kBatch, 3, 8}, {C({3, 1}), C({1}, 2)},
                                 {{"axis", int64_t{-2}}}));
  ExpectMatchesReference(OneNode("LayerNormalization", {3, 8}, {C({3, 8})}, {{"axis", int64_t{0}}}),
                         0);
}

TEST(ReshapeTest, ZeroAndMinusOneKeepTheBatch) {
  for (const std::vector<double>& to : std::vector<std::vector<double>>{{0, -1},
                                                                        {-1, 24},
                                                                        {0, 4, 6},
                                                                        {0, 0, -1},
                                                                        {-1, 2, 3, 4},
                                                                        {0, 2, 3, 4},
                                                                        {0, 1, 24, 1},
                                                                        {-1, 0, 3, 4}}) {
    ExpectMatchesReference(OneNode("Reshape", {kBatch, 2, 12}, {[=] { return Shape64(to); }}));
  }
  ExpectMatchesReference(OneNode("Reshape", {2, 12}, {[] { return Shape64({-1, 3}); }}), 0);
  ExpectMatchesReference(OneNode("Reshape", {2, 12}, {[] { return Shape64({24}); }}), 0);
}

TEST(FlattenTest, AxisOneKeepsTheBatchAndOthersWorkWithoutIt) {
  ExpectMatchesReference(OneNode("Flatten", {kBatch, 2, 3, 4}, {}));
  ExpectMatchesReference(OneNode("Flatten", {kBatch, 2, 3, 4}, {}, {{"axis", int64_t{-3}}}));
  ExpectMatchesReference(OneNode("Flatten", {kBatch, 1, 3}, {}, {{"axis", int64_t{2}}}));
  for (const int64_t axis : {0, 1, 2, 3, -1}) {
    ExpectMatchesReference(OneNode("Flatten", {2, 3, 4}, {}, {{"axis", axis}}), 0);
  }
}

TEST(TransposeTest, EveryPermutationOfItemAxesMatches) {
  for (const Ints& perm : {Ints{0, 1, 2, 3}, Ints{0, 1, 3, 2}, Ints{0, 2, 1, 3}, Ints{0, 2, 3, 1},
                           Ints{0, 3, 1, 2}, Ints{0, 3, 2, 1}}) {
    ExpectMatchesReference(OneNode("Transpose", {kBatch, 3, 4, 5}, {}, {{"perm", perm}}));
    ExpectMatchesReference(OneNode("Transpose", {kBatch, 1, 40, 70}, {}, {{"perm", perm}}));
  }
  ExpectMatchesReference(OneNode("Transpose", {3, 4, 5}, {}), 0);
  ExpectMatchesReference(OneNode("Transpose", {3, 4, 5}, {}, {{"perm", Ints{2, 0, 1}}}), 0);
}

TEST(CastTest, RoundsThroughTheTargetType) {
  for (const DType from : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64,
                           DType::kInt32, DType::kInt64, DType::kUint8, DType::kBool}) {
    for (const auto& [onnx, to] : std::map<int64_t, DType>{{1, DType::kFloat32},
                                                           {2, DType::kUint8},
                                                           {6, DType::kInt32},
                                                           {7, DType::kInt64},
                                                           {9, DType::kBool},
                                                           {10, DType::kFloat16},
                                                           {11, DType::kFloat64},
                                                           {16, DType::kBFloat16}}) {
      if (to == DType::kUint8 && SizeOf(from) > 1) continue;  // negative inputs: undefined in ONNX
      ExpectMatchesReference(
          [=, onnx = onnx, to = to] {
            formats::ModelGraph graph = MakeGraph({kBatch, 300}, from);
            graph.outputs[0].dtype = to;
            graph.nodes.push_back(MakeNode("Cast", {"x"}, {"y"}, {{"to", onnx}}));
            return graph;
          },
          7, 0);
    }
  }
}

TEST(IdentityTest, IdentityAndDropoutPassTheirInputOn) {
  ExpectMatchesReference(OneNode("Identity", {kBatch, 5}, {}));
  ExpectMatchesReference(OneNode("Dropout", {kBatch, 5}, {}, {{"ratio", 0.25f}}, 10));
  ExpectMatchesReference(OneNode("Dropout", {kBatch, 5},
                                 {[] { return MakeTensor(DType::kFloat32, {}, {0.25}); },
                                  [] { return MakeTensor(DType::kBool, {}, {0}); }}));
}

TEST(HalfModelTest, HalfInputsAndOutputsAreConvertedAtTheEdge) {
  ExpectMatchesReference(
      [] {
        formats::ModelGraph graph = MakeGraph({kBatch, 8}, DType::kFloat16);
        graph.initializers.emplace("s", Floats({8}, 3, DType::kFloat16));
        graph.nodes.push_back(MakeNode("Mul", {"x", "s"}, {"m"}));
        graph.nodes.push_back(MakeNode("Softmax", {"m"}, {"y"}));
        return graph;
      },
      7, 0x1p-11);
}

TEST(IntegerModelTest, IntegersMayBeMovedAndCast) {
  ExpectMatchesReference([] {
    formats::ModelGraph graph = MakeGraph({kBatch, 2, 28}, DType::kUint8);
    graph.outputs[0].dtype = DType::kFloat32;
    graph.initializers.emplace("scale", MakeTensor(DType::kFloat32, {}, {1 / 255.0}));
    graph.nodes.push_back(MakeNode("Transpose", {"x"}, {"t"}, {{"perm", Ints{0, 2, 1}}}));
    graph.nodes.push_back(MakeNode("Flatten", {"t"}, {"f"}));
    graph.nodes.push_back(MakeNode("Cast", {"f"}, {"c"}, {{"to", int64_t{1}}}));
    graph.nodes.push_back(MakeNode("Mul", {"c", "scale"}, {"y"}));
    return graph;
  });
}

}  // namespace
}  // namespace espalier::testing
