// PreparedModel::Edit: a model that is edited answers as one that is loaded from the new weights.
#include "engine/planner/weight_editor.h"

#include <cmath>
#include <cstring>
#include <functional>

#include "absl/strings/str_cat.h"
#include "engine/planner/prepared_model.h"
#include "engine/planner/replicated_model.h"
#include "engine/tensor/cuda_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/planner/mlp_builder.h"
#include "tests/engine/planner/weight_changes.h"
#include "tests/testing/fake_cuda.h"

namespace espalier::planner {
namespace {

using namespace espalier::testing;  // NOLINT(google-build-using-namespace)
using ::testing::AllOf;
using ::testing::HasSubstr;
using Mutate = std::function<void(const std::string&, Tensor&)>;

constexpr int64_t kMaxBatch = 8;

// x through w1 stored [in, out], then w2 as it is and the same w2 transposed, a LayerNorm, and a weight with two names.
formats::ModelGraph MixedGraph(DType dtype) {
  formats::ModelGraph graph = MakeGraph({kBatch, 48}, dtype);
  const auto add = [&](const char* name, Tensor tensor) {
    graph.initializers.emplace(name, std::move(tensor));
  };
  add("w1", PatternWeight(Pattern::kScattered, 48, 64, 0.2, 1, dtype));
  add("b1", MakeTensor(dtype, {64}, RandomData(64, 2)));
  add("w2", PatternWeight(Pattern::kBlocks, 32, 64, 0.4, 3, dtype));
  add("scale", MakeTensor(dtype, {64}, RandomData(64, 4)));
  add("shift", MakeTensor(dtype, {64}, RandomData(64, 5)));
  add("w3", PatternWeight(Pattern::kDiagonal, 64, 64, 0.1, 6, dtype));
  add("half", MakeTensor(dtype, {}, {0.5}));
  graph.nodes.push_back(MakeNode("MatMul", {"x", "w1"}, {"h1"}));
  graph.nodes.push_back(MakeNode("Add", {"h1", "b1"}, {"h2"}));
  graph.nodes.push_back(MakeNode("Gemm", {"h2", "w2"}, {"h3"}, {{"transB", int64_t{1}}}));
  graph.nodes.push_back(MakeNode("Gemm", {"h3", "w2"}, {"h4"}));
  graph.nodes.push_back(MakeNode("LayerNormalization", {"h4", "scale", "shift"}, {"h5"}));
  graph.nodes.push_back(MakeNode("Identity", {"w3"}, {"w3_again"}));
  graph.nodes.push_back(MakeNode("MatMul", {"h5", "w3"}, {"h6"}));
  graph.nodes.push_back(MakeNode("MatMul", {"h6", "w3_again"}, {"h7"}));
  graph.nodes.push_back(MakeNode("Mul", {"h7", "half"}, {"h8"}));
  graph.nodes.push_back(MakeNode("Mul", {"h8", "scale"}, {"y"}));
  return graph;
}

std::string Answers(const PreparedModel& model, ExecutionState& state) {
  std::string answers;
  const size_t in_bytes = model.inputs()[0].shape.back() * SizeOf(model.inputs()[0].dtype);
  const size_t out_bytes = model.outputs()[0].shape.back() * SizeOf(model.outputs()[0].dtype);
  for (const int64_t batch : {1, 5, 8}) {
    const auto x = RandomData(batch * model.inputs()[0].shape.back(), 9);
    ConvertElements(x.data(), DType::kFloat64, state.input(0), model.inputs()[0].dtype,
                    static_cast<int64_t>(x.size()));
    const absl::Status status = model.Run(state, batch);
    EXPECT_TRUE(status.ok()) << status;
    answers.append(static_cast<const char*>(state.output(0)), batch * out_bytes);
  }
  EXPECT_GT(in_bytes, 0u);
  return answers;
}

class WeightEditorTest : public ::testing::Test {
 protected:
  WeightEditorTest() {
    FakeCuda::Reset().micros = ProportionalMicros;
    gpu_ = *CudaDevice::Open(FakeCuda::Module(), {});
  }
  static PrepareOptions Deterministic() {
    PrepareOptions options;
    options.max_batch_size = kMaxBatch;
    options.deterministic = true;
    return options;
  }
  std::unique_ptr<PreparedModel> Prepare(formats::ModelGraph graph, const PrepareOptions& options,
                                         const Device& device) {
    auto model = PreparedModel::Prepare(std::move(graph), device, options);
    EXPECT_TRUE(model.ok()) << model.status();
    return *std::move(model);
  }
  formats::ModelGraph Changed(const Build& build, const Mutate& mutate) {
    formats::ModelGraph graph = build();
    for (auto& [name, tensor] : graph.initializers) mutate(name, tensor);
    return graph;
  }
  static absl::Status EditInPieces(PreparedModel& model, absl::Span<const TensorEdit> edits,
                                   const formats::WeightSource& after) {
    constexpr size_t kPiece = 50;
    auto editing = model.BeginEdit(after);
    if (!editing.ok()) return editing.status();
    for (const TensorEdit& edit : edits) {
      for (size_t first = 0; first < edit.elements.size(); first += kPiece) {
        const TensorEdit piece = {edit.tensor, edit.elements.subspan(first, kPiece)};
        if (absl::Status status = (*editing)->Apply(piece); !status.ok()) return status;
      }
    }
    return (*editing)->Finish();
  }
  // OK when it was edited, and then answers as a fresh load; the states from before, too.
  absl::Status EditAndCompare(const Build& build, const Mutate& mutate,
                              const PrepareOptions& options, const Device& device) {
    const formats::ModelGraph after = Changed(build, mutate);
    const Changes changes(build(), after);
    EXPECT_FALSE(changes.edits().empty());
    auto model = Prepare(build(), options, device);
    auto state = *model->NewState();
    const std::string before = Answers(*model, *state);
    auto clone = model->Clone();
    if (!clone.ok()) return clone.status();
    if (absl::Status status = model->Edit(changes.edits(), GraphWeights(after)); !status.ok())
      return status;
    auto fresh = Prepare(Changed(build,
                                 [&](const std::string& name, Tensor& tensor) {
                                   std::memcpy(tensor.data(), after.initializers.at(name).data(),
                                               tensor.bytes());
                                 }),
                         options, device);
    auto fresh_state = *fresh->NewState();
    const std::string expected = Answers(*fresh, *fresh_state);
    EXPECT_EQ(Answers(*model, *state), expected) << "a state from before";
    EXPECT_EQ(Answers(*model, **model->NewState()), expected) << "a new state";
    EXPECT_EQ(model->weight_bytes(), fresh->weight_bytes());
    auto clone_state = *(*clone)->NewState();
    EXPECT_EQ(Answers(**clone, *clone_state), before) << "a clone has weights of its own";
    EXPECT_TRUE(EditInPieces(**clone, changes.edits(), GraphWeights(after)).ok());
    EXPECT_EQ(Answers(**clone, *clone_state), expected) << "and is edited as the original is";
    EXPECT_EQ((*clone)->weight_bytes(), model->weight_bytes());
    return absl::OkStatus();
  }

  std::unique_ptr<Device> cpu_ = MakeCpuDevice(1);
  std::unique_ptr<CudaDevice> gpu_;
  std::mt19937 random_{5};
};

TEST_F(WeightEditorTest, ChangedValuesAnswerAsAFreshLoadWhateverTypeStructureAndOrder) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const bool flush : {false, true}) {
      PrepareOptions options = Deterministic();
      options.flush_subnormals = flush;
      for (const Pattern pattern :
           {Pattern::kDense, Pattern::kDiagonal, Pattern::kBlocks, Pattern::kScattered}) {
        const absl::Status status = EditAndCompare(
            [&] {
              return MakeMlp({96, 130, 64, 10}, pattern, 0.15, dtype);
            },
            [&](const std::string&, Tensor& tensor) {
              Apply(Change::kValue, 0.05, tensor, random_);
            },
            options, *cpu_);
        EXPECT_TRUE(status.ok()) << status;
      }
      const absl::Status mixed = EditAndCompare([&] { return MixedGraph(dtype); },
                                                [&](const std::string& name, Tensor& tensor) {
                                                  if (name != "half")
                                                    Apply(Change::kValue, 0.2, tensor, random_);
                                                },
                                                options, *cpu_);
      EXPECT_TRUE(mixed.ok()) << mixed;
    }
  }
}

TEST_F(WeightEditorTest, MovedNonZerosAnswerAsAFreshLoadOrAreLeftToOne) {
  int edited = 0, left = 0;
  for (const Pattern pattern : {Pattern::kDense, Pattern::kDiagonal, Pattern::kBlocks,
                                Pattern::kScattered, Pattern::kZero}) {
    for (const Change change : {Change::kDrop, Change::kGrow, Change::kOdd, Change::kSign}) {
      for (const double share : {0.0005, 0.02, 0.5}) {
        const absl::Status status = EditAndCompare(
            [&] {
              return MakeMlp({96, 130, 64, 10}, pattern, 0.15);
            },
            [&](const std::string& name, Tensor& tensor) {
              Apply(change, name[0] == 'w' ? share : 0.5, tensor, random_);
              SetBits(tensor, 0, BitsAt(tensor, 0) ^ 0x80000000u);  // something differs
            },
            Deterministic(), *cpu_);
        if (status.ok()) ++edited;
        if (absl::IsUnimplemented(status)) ++left;
        EXPECT_TRUE(status.ok() || absl::IsUnimplemented(status)) << status;
      }
    }
  }
  EXPECT_GT(edited, 20);
  EXPECT_GT(left, 0);
}

TEST_F(WeightEditorTest, WithoutDeterminismEveryChangeIsTakenAndIsRight) {
  PrepareOptions options;
  options.max_batch_size = kMaxBatch;
  options.measure_budget_millis = 0;
  for (const WeightMemory mode : {WeightMemory::kSmallest, WeightMemory::kFastest}) {
    options.weight_memory = mode;
    for (const Pattern pattern : {Pattern::kDense, Pattern::kDiagonal, Pattern::kBlocks,
                                  Pattern::kScattered, Pattern::kZero}) {
      const auto build = [&] { return MakeMlp({96, 130, 64, 10}, pattern, 0.15); };
      auto model = Prepare(build(), options, *cpu_);
      auto state = *model->NewState();
      formats::ModelGraph now = build();
      for (const Change change : {Change::kValue, Change::kDrop, Change::kGrow, Change::kValue,
                                  Change::kGrow, Change::kSign, Change::kDrop}) {
        const formats::ModelGraph next =
            Changed(build, [&](const std::string& name, Tensor& tensor) {
              std::memcpy(tensor.data(), now.initializers.at(name).data(), tensor.bytes());
              Apply(change, 0.1, tensor, random_);
            });
        const absl::Status status = model->Edit(Changes(now, next).edits(), GraphWeights(next));
        ASSERT_TRUE(status.ok()) << status;
        for (auto& [name, tensor] : now.initializers)
          std::memcpy(tensor.data(), next.initializers.at(name).data(), tensor.bytes());
        const auto x = RandomData(5 * 96, 9);
        const auto expected = EvaluateReference(next, {{"x", {{5, 96}, x}}}).at("y").data;
        ConvertElements(x.data(), DType::kFloat64, state->input(0), DType::kFloat32, 5 * 96);
        ASSERT_TRUE(model->Run(*state, 5).ok());
        for (size_t i = 0; i < expected.size(); ++i) {
          ASSERT_NEAR(static_cast<const float*>(state->output(0))[i], expected[i], 2e-3)
              << static_cast<int>(pattern) << " after change " << static_cast<int>(change);
        }
      }
    }
  }
}

// Without determinism, for it would choose kernels that the fake device lacks; its times and sums are the same in every
// run all the same.
TEST_F(WeightEditorTest, AGpuAnswersAsAFreshLoadAndItsGraphsStay) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const auto precision : {formats::Precision::kAsStored, formats::Precision::kBFloat16}) {
      PrepareOptions options;
      options.max_batch_size = kMaxBatch;
      options.precision = precision;
      for (const Pattern pattern : {Pattern::kDense, Pattern::kBlocks}) {
        const absl::Status status = EditAndCompare(
            [&] {
              return MakeMlp({64, 128, 64}, pattern, 0.3, dtype);
            },
            [&](const std::string&, Tensor& tensor) {
              Apply(Change::kValue, 0.03, tensor, random_);
            },
            options, *gpu_);
        EXPECT_TRUE(status.ok()) << status;
      }
    }
  }
  const auto build = [] { return MakeMlp({64, 128, 64}, Pattern::kBlocks, 0.3, DType::kBFloat16); };
  auto model = Prepare(build(), {.max_batch_size = kMaxBatch}, *gpu_);
  auto state = *model->NewState();
  const int captures = FakeCuda::Get().captures;
  const auto after = Changed(build, [&](const std::string&, Tensor& tensor) {
    Apply(Change::kValue, 0.1, tensor, random_);
  });
  ASSERT_TRUE(model->Edit(Changes(build(), after).edits(), GraphWeights(after)).ok());
  Answers(*model, *state);
  EXPECT_EQ(FakeCuda::Get().captures, captures) << "addresses and counts are as before";
}

TEST_F(WeightEditorTest, AGpuTakesBlocksThatAreGainedAndCapturesItsGraphsAnew) {
  const auto build = [] { return MakeMlp({64, 128, 64}, Pattern::kBlocks, 0.3); };
  PrepareOptions options;
  options.max_batch_size = kMaxBatch;
  options.precision = formats::Precision::kBFloat16;
  auto model = Prepare(build(), options, *gpu_);
  ASSERT_EQ(model->plan().layers[0].buckets[0].chosen.spec.layout, kernels::Layout::kBlockCsr);
  auto state = *model->NewState();
  const auto after = Changed(build, [&](const std::string& name, Tensor& tensor) {
    if (name[0] == 'w') Apply(Change::kGrow, 0.03, tensor, random_);
  });
  const size_t bytes = model->weight_bytes();
  const int captures = FakeCuda::Get().captures;
  const absl::Status status = model->Edit(Changes(build(), after).edits(), GraphWeights(after));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_GT(model->weight_bytes(), bytes);
  const auto x = RandomData(5 * 64, 9);
  const auto expected = EvaluateReference(after, {{"x", {{5, 64}, x}}}).at("y").data;
  ConvertElements(x.data(), DType::kFloat64, state->input(0), DType::kFloat32, 5 * 64);
  ASSERT_TRUE(model->Run(*state, 5).ok());
  EXPECT_GT(FakeCuda::Get().captures, captures);
  for (size_t i = 0; i < expected.size(); ++i)
    ASSERT_NEAR(static_cast<const float*>(state->output(0))[i], expected[i], 0.1);
}

TEST_F(WeightEditorTest, EveryReplicaIsEdited) {
  const auto build = [] { return MakeMlp({64, 128, 64}, Pattern::kBlocks, 0.3); };
  std::vector<std::unique_ptr<PreparedModel>> replicas;
  for (int i = 0; i < 2; ++i) replicas.push_back(Prepare(build(), Deterministic(), *cpu_));
  auto model = MakeReplicatedModel(std::move(replicas), {0, 1});
  const auto after = Changed(build, [&](const std::string&, Tensor& tensor) {
    Apply(Change::kValue, 0.1, tensor, random_);
  });
  auto first = *model->NewState(), second = *model->NewState();
  const std::string before = Answers(*model, *first);
  ASSERT_TRUE(model->Edit(Changes(build(), after).edits(), GraphWeights(after)).ok());
  EXPECT_NE(Answers(*model, *first), before);
  EXPECT_EQ(Answers(*model, *first), Answers(*model, *second));
}

TEST_F(WeightEditorTest, ABaseThatIsAnotherIsRefusedByTensorAndPosition) {
  const auto build = [] { return MixedGraph(DType::kFloat32); };
  for (const char* name : {"w1", "b1", "w2", "w3", "scale"}) {
    for (const Device* device :
         {static_cast<const Device*>(cpu_.get()), static_cast<const Device*>(gpu_.get())}) {
      auto model = Prepare(build(), Deterministic(), *device);
      const auto graph = build();
      std::vector<sparse::ElementEdit> elements = {
          {5, BitsAt(graph.initializers.at(name), 5) ^ 1, 0x3f800000}};
      const absl::Status status = model->Edit({{{name, elements}}}, GraphWeights(graph));
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << name;
      EXPECT_THAT(status.message(), AllOf(HasSubstr(absl::StrCat("'", name, "'")), HasSubstr("5")));
    }
  }
}

TEST_F(WeightEditorTest, PositionsThatDoNotAscendInTheTensorAreRefused) {
  const auto graph = MixedGraph(DType::kFloat32);
  for (const std::vector<int64_t>& positions :
       std::vector<std::vector<int64_t>>{{-1}, {48 * 64}, {5, 5}, {7, 6}, {int64_t{1} << 62}}) {
    auto model = Prepare(MixedGraph(DType::kFloat32), Deterministic(), *cpu_);
    std::vector<sparse::ElementEdit> elements;
    for (const int64_t position : positions) elements.push_back({position, 0, 0});
    EXPECT_EQ(model->Edit({{{"w1", elements}}}, GraphWeights(graph)).code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST_F(WeightEditorTest, PositionsAscendFromPieceToPieceOfATensor) {
  const auto graph = MixedGraph(DType::kFloat32);
  const auto edit = [&](const char* name, int64_t position) {
    const uint32_t bits = BitsAt(graph.initializers.at(name), position);
    return std::vector<sparse::ElementEdit>{{position, bits, bits}};
  };
  const auto first = edit("w1", 5), next = edit("w1", 6), other = edit("w2", 0);
  auto model = Prepare(MixedGraph(DType::kFloat32), Deterministic(), *cpu_);
  const GraphWeights after(graph);
  auto editing = *model->BeginEdit(after);
  EXPECT_TRUE(editing->Apply({"w1", first}).ok());
  EXPECT_TRUE(editing->Apply({"w1", next}).ok());
  EXPECT_TRUE(editing->Apply({"w2", other}).ok());
  EXPECT_TRUE(editing->Finish().ok());
  editing = *model->BeginEdit(after);
  EXPECT_TRUE(editing->Apply({"w1", next}).ok());
  EXPECT_EQ(editing->Apply({"w1", first}).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(WeightEditorTest, WhatIsNotThereElementByElementIsLeftToALoad) {
  formats::ModelGraph graph = MakeGraph({kBatch, 4});
  const auto add = [&](const char* name, const Shape& shape, int64_t count) {
    graph.initializers.emplace(name, MakeTensor(DType::kFloat32, shape, RandomData(count, 3)));
  };
  add("scaled", {4, 4}, 16);
  add("folded", {4, 4}, 16);
  add("spread", {1}, 1);
  add("unused", {4}, 4);
  add("row", {4}, 4);
  graph.nodes.push_back(MakeNode("Gemm", {"x", "scaled"}, {"a"}, {{"alpha", 2.0f}}));
  graph.nodes.push_back(MakeNode("Relu", {"folded"}, {"positive"}));
  graph.nodes.push_back(MakeNode("MatMul", {"a", "positive"}, {"b"}));
  graph.nodes.push_back(MakeNode("MatMul", {"b", "folded"}, {"c"}));
  graph.nodes.push_back(MakeNode("Add", {"c", "spread"}, {"d"}));
  graph.nodes.push_back(MakeNode("MatMul", {"d", "row"}, {"y"}));
  const auto weights = MakeGraph({kBatch, 4});
  auto model = Prepare(std::move(graph), Deterministic(), *cpu_);
  const sparse::ElementEdit first = {0, 0, 1};
  for (const char* name : {"scaled", "folded", "spread", "unused", "row", "x", "no such"}) {
    const absl::Status status = model->Edit({{{name, {&first, 1}}}}, GraphWeights(weights));
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << name;
    EXPECT_THAT(status.message(), HasSubstr(name));
  }
}

TEST_F(WeightEditorTest, ADiagonalThatIsGainedNeedsMoreScratchAndStatesGetIt) {
  const auto build = [] { return MakeMlp({512, 512}, Pattern::kDiagonal, 0.01); };
  PrepareOptions options;
  options.max_batch_size = kMaxBatch;
  options.weight_memory = WeightMemory::kSmallest;
  options.measure_budget_millis = 0;
  auto model = Prepare(build(), options, *cpu_);
  ASSERT_EQ(model->plan().layers[0].buckets[0].chosen.spec.layout, kernels::Layout::kDiagonal);
  auto state = *model->NewState();
  const formats::ModelGraph after = Changed(build, [&](const std::string& name, Tensor& tensor) {
    for (int64_t i = 0; name == "w1" && i < 512; ++i) {
      for (const int64_t offset : {3, 70, 71, 200, 300, 400, 401, 402, 500})
        tensor.As<float>()[i * 512 + (i + offset) % 512] = 0.25f;
    }
  });
  const size_t bytes = model->weight_bytes();
  ASSERT_TRUE(model->Edit(Changes(build(), after).edits(), GraphWeights(after)).ok());
  EXPECT_GT(model->weight_bytes(), bytes);
  auto fresh_state = *model->NewState();
  EXPECT_EQ(Answers(*model, *state), Answers(*model, *fresh_state));
}

}  // namespace
}  // namespace espalier::planner
