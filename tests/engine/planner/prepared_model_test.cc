#include "engine/planner/prepared_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "engine/planner/choose.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/planner/mlp_builder.h"

namespace espalier::planner {
namespace {

using namespace espalier::testing;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr Pattern kPatterns[] = {Pattern::kDense, Pattern::kDiagonal, Pattern::kBlocks,
                                 Pattern::kScattered, Pattern::kZero};
constexpr WeightMemory kModes[] = {WeightMemory::kSmallest, WeightMemory::kBalanced,
                                   WeightMemory::kFastest};

const Device& OneThread() {
  static const Device& device = *MakeCpuDevice(1).release();
  return device;
}

std::unique_ptr<PreparedModel> MustPrepare(formats::ModelGraph graph, const PrepareOptions& options,
                                           const Device& device = OneThread()) {
  auto model = PreparedModel::Prepare(std::move(graph), device, options);
  EXPECT_TRUE(model.ok()) << model.status();
  return model.ok() ? *std::move(model) : nullptr;
}

// Outputs "y" for the first `batch` rows of `x`.
std::vector<float> RunModel(const PreparedModel& model, ExecutionState& state,
                            const std::vector<float>& x, int64_t first, int64_t batch) {
  const int64_t in = model.inputs()[0].shape.back(), out = model.outputs()[0].shape.back();
  std::memcpy(state.input(0), &x[first * in], sizeof(float) * batch * in);
  const absl::Status status = model.Run(state, batch);
  EXPECT_TRUE(status.ok()) << status;
  const float* y = static_cast<const float*>(state.output(0));
  return {y, y + batch * out};
}

std::vector<float> RandomFloats(int64_t count, uint32_t seed) {
  const std::vector<double> values = RandomData(count, seed);
  return {values.begin(), values.end()};
}

TEST(PreparedModelTest, EveryStructureModeAndBatchMatchesTheOracle) {
  const std::vector<int64_t> widths = {70, 96, 50, 10};
  const int64_t max_batch = 40;
  const std::vector<float> x = RandomFloats(max_batch * widths[0], 5);
  for (const Pattern pattern : kPatterns) {
    const formats::ModelGraph graph = MakeMlp(widths, pattern, 0.15);
    const auto expected = EvaluateReference(
        graph, {{"x", {{max_batch, widths[0]}, std::vector<double>(x.begin(), x.end())}}});
    for (const WeightMemory mode : kModes) {
      PrepareOptions options;
      options.max_batch_size = max_batch;
      options.weight_memory = mode;
      auto model = MustPrepare(MakeMlp(widths, pattern, 0.15), options);
      ASSERT_NE(model, nullptr);
      auto state = model->NewState();
      ASSERT_TRUE(state.ok());
      for (const int64_t batch : {1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 40}) {
        const auto y = RunModel(*model, **state, x, 0, batch);
        for (size_t i = 0; i < y.size(); ++i) {
          ASSERT_NEAR(y[i], expected.at("y").data[i], 2e-4) << ToTable(model->plan()) << "at " << i;
        }
      }
    }
  }
}

TEST(PreparedModelTest, DeterministicAnswersAreBitIdenticalWhateverTheBatchAndThreads) {
  const std::vector<int64_t> widths = {784, 200, 130, 10};
  const int64_t max_batch = 64;
  const std::vector<float> x = RandomFloats(max_batch * widths[0], 6);
  const auto two_threads = MakeCpuDevice(2);
  for (const Pattern pattern : kPatterns) {
    PrepareOptions options;
    options.max_batch_size = max_batch;
    options.deterministic = true;
    auto model = MustPrepare(MakeMlp(widths, pattern, 0.1), options);
    auto threaded = MustPrepare(MakeMlp(widths, pattern, 0.1), options, *two_threads);
    ASSERT_NE(model, nullptr);
    ASSERT_NE(threaded, nullptr);
    EXPECT_EQ(model->plan().source, "deterministic");
    for (const LayerPlan& layer : model->plan().layers) {
      for (const BucketChoice& bucket : layer.buckets) {
        EXPECT_EQ(bucket.chosen.variant, layer.buckets[0].chosen.variant);
        EXPECT_FALSE(bucket.chosen.measured);
      }
    }
    auto state = model->NewState();
    auto threaded_state = threaded->NewState();
    const auto all = RunModel(*model, **state, x, 0, max_batch);
    for (const int64_t batch : {1, 3, 7, 16, 33, 64}) {
      for (int64_t first = 0; first + batch <= max_batch; first += batch) {
        const auto y = RunModel(*model, **state, x, first, batch);
        ASSERT_EQ(std::memcmp(y.data(), &all[first * 10], y.size() * sizeof(float)), 0)
            << "items " << first << " + " << batch;
        const auto z = RunModel(*threaded, **threaded_state, x, first, batch);
        ASSERT_EQ(std::memcmp(z.data(), &all[first * 10], z.size() * sizeof(float)), 0)
            << "two threads";
      }
    }
  }
}

TEST(PreparedModelTest, FastestPlansAreNeverSlowerThanDenseAndBalancedOnesNeverIntolerably) {
  for (const WeightMemory mode : {WeightMemory::kBalanced, WeightMemory::kFastest}) {
    for (const Pattern pattern : kPatterns) {
      PrepareOptions options;
      options.max_batch_size = 32;
      options.weight_memory = mode;
      auto model = MustPrepare(MakeMlp({128, 128, 128}, pattern, 0.3), options);
      ASSERT_NE(model, nullptr);
      EXPECT_EQ(model->plan().source, "measured");
      for (const LayerPlan& layer : model->plan().layers) {
        ASSERT_EQ(layer.buckets.size(), 6u);
        for (const BucketChoice& bucket : layer.buckets) {
          EXPECT_TRUE(bucket.chosen.measured);
          const double dense = bucket.dense_micros;
          const bool zero = layer.structure == "zero";  // takes an empty layout in any case
          EXPECT_TRUE(zero ||
                      bucket.chosen.micros <=
                          (mode == WeightMemory::kFastest ? dense : TolerableMicros(dense, 3)))
              << ToTable(model->plan());
        }
        if (mode == WeightMemory::kBalanced) {
          EXPECT_LE(layer.weight_bytes, layer.dense_bytes * 1.05 + 256) << ToTable(model->plan());
        }
      }
    }
  }
}

TEST(PreparedModelTest, SmallestShrinksWithTheDensity) {
  for (const double density : {0.5, 0.1, 0.05}) {
    for (const Pattern pattern : {Pattern::kDiagonal, Pattern::kBlocks, Pattern::kScattered}) {
      PrepareOptions options;
      options.weight_memory = WeightMemory::kSmallest;
      options.measure_budget_millis = 50;
      auto model = MustPrepare(MakeMlp({1024, 1024}, pattern, density), options);
      ASSERT_NE(model, nullptr);
      const LayerPlan& layer = model->plan().layers[0];
      const double dense = static_cast<double>(layer.dense_bytes), kept = 1 - layer.sparsity;
      const double bar = pattern == Pattern::kScattered ? 2.1 * kept : 1.05 * kept;
      EXPECT_LE(static_cast<double>(layer.weight_bytes), dense * bar) << ToTable(model->plan());
      EXPECT_EQ(model->dense_weight_bytes(), layer.dense_bytes + 1024 * sizeof(float));
      EXPECT_EQ(model->weight_bytes(), layer.weight_bytes + 1024 * sizeof(float));
    }
  }
}

TEST(PreparedModelTest, BucketsAreThePowersOfTwoAndTheLargestBatch) {
  PrepareOptions options;
  options.max_batch_size = 12;
  options.measure_budget_millis = 0;
  auto model = MustPrepare(MakeMlp({16, 16}, Pattern::kDense, 1), options);
  ASSERT_NE(model, nullptr);
  EXPECT_EQ(model->plan().source, "cost model");
  std::vector<int64_t> batches;
  for (const BucketChoice& bucket : model->plan().layers[0].buckets)
    batches.push_back(bucket.batch);
  EXPECT_EQ(batches, (std::vector<int64_t>{1, 2, 4, 8, 12}));
}

TEST(PreparedModelTest, HalfPrecisionWeightsRun) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const Pattern pattern : {Pattern::kDense, Pattern::kBlocks, Pattern::kScattered}) {
      PrepareOptions options;
      options.max_batch_size = 4;
      options.measure_budget_millis = 20;
      const formats::ModelGraph graph = MakeMlp({64, 48, 16}, pattern, 0.2, dtype);
      auto model = MustPrepare(MakeMlp({64, 48, 16}, pattern, 0.2, dtype), options);
      ASSERT_NE(model, nullptr);
      auto state = *model->NewState();
      const auto inputs = RandomInputs(graph, 4, 3);
      ConvertElements(inputs.at("x").data.data(), DType::kFloat64, state->input(0), dtype, 4 * 64);
      ASSERT_TRUE(model->Run(*state, 4).ok());
      const auto expected = EvaluateReference(graph, inputs).at("y").data;
      const Values y = ToValues({dtype, {4, 16}, state->output(0)});
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_NEAR(y.data[i], expected[i], (dtype == DType::kFloat16 ? 0x1p-10 : 0x1p-7) * 8);
      }
    }
  }
}

TEST(PreparedModelTest, AModelWithoutBatchDimensionRunsAsItIs) {
  formats::ModelGraph graph = MakeMlp({24, 24}, Pattern::kScattered, 0.3);
  graph.inputs[0].shape = {3, 24};
  PrepareOptions options;
  options.max_batch_size = 0;
  auto model = MustPrepare(std::move(graph), options);
  ASSERT_NE(model, nullptr);
  ASSERT_EQ(model->plan().layers[0].buckets.size(), 1u);
  EXPECT_EQ(model->plan().layers[0].buckets[0].tokens, 3);
  auto state = *model->NewState();
  EXPECT_TRUE(model->Run(*state, 17).ok()) << "the batch is ignored";
}

TEST(PreparedModelTest, AWeightThatIsUsedTwiceIsHeldOnce) {
  formats::ModelGraph graph = MakeGraph({kBatch, 64});
  graph.initializers.emplace("w", PatternWeight(Pattern::kScattered, 64, 64, 0.05, 1));
  graph.nodes.push_back(MakeNode("MatMul", {"x", "w"}, {"h"}));
  graph.nodes.push_back(MakeNode("MatMul", {"h", "w"}, {"y"}));
  PrepareOptions options;
  options.weight_memory = WeightMemory::kSmallest;
  auto model = MustPrepare(std::move(graph), options);
  ASSERT_NE(model, nullptr);
  ASSERT_EQ(model->plan().layers.size(), 2u);
  EXPECT_EQ(model->weight_bytes(), model->plan().layers[0].weight_bytes);
  EXPECT_EQ(model->dense_weight_bytes(), 64 * 64 * sizeof(float));
  EXPECT_EQ(model->plan().dense_bytes, model->dense_weight_bytes());
  EXPECT_EQ(model->plan().layers[0].weight, model->plan().layers[1].weight);
}

TEST(PreparedModelTest, AMatrixItsTransposeAndItsUseAsATableAreOneDenseTensor) {
  formats::ModelGraph graph = MakeGraph({kBatch, 64});
  graph.initializers.emplace("w", PatternWeight(Pattern::kScattered, 64, 64, 0.05, 1));
  graph.nodes.push_back(MakeNode("Gemm", {"x", "w"}, {"h"}));
  graph.nodes.push_back(MakeNode("Gemm", {"h", "w"}, {"i"}, {{"transB", int64_t{1}}}));
  graph.nodes.push_back(MakeNode("Reshape", {"i", "shape"}, {"j"}));
  graph.initializers.emplace("shape", MakeTensor(DType::kInt64, {3}, {0, 1, 64}));
  graph.nodes.push_back(MakeNode("Add", {"j", "w"}, {"y"}));
  auto model = MustPrepare(std::move(graph), {});
  ASSERT_NE(model, nullptr);
  ASSERT_EQ(model->plan().layers.size(), 2u);
  EXPECT_EQ(model->dense_weight_bytes(), 64 * 64 * sizeof(float));
  EXPECT_EQ(model->weight_bytes(), model->plan().weight_bytes + 64 * 64 * sizeof(float));
}

TEST(PreparedModelTest, AWeightOfZerosStoresNoValueInAnyMode) {
  for (const WeightMemory mode : kModes) {
    PrepareOptions options;
    options.weight_memory = mode;
    options.max_batch_size = 8;
    auto model = MustPrepare(MakeMlp({784, 10}, Pattern::kZero, 0), options);
    ASSERT_NE(model, nullptr);
    EXPECT_LE(model->plan().weight_bytes, 128u) << ToTable(model->plan());  // offsets of rows
  }
}

TEST(PreparedModelTest, SubnormalsAreFlushedWhenAskedFor) {
  const auto build = [] {
    formats::ModelGraph graph = MakeGraph({kBatch, 4});
    Tensor w = MakeTensor(DType::kFloat32, {4, 4}, std::vector<double>(16, 0.0));
    w.As<float>()[0] = 1e-40f;
    w.As<float>()[5] = 1;
    graph.initializers.emplace("w", std::move(w));
    graph.nodes.push_back(MakeNode("MatMul", {"x", "w"}, {"y"}));
    return graph;
  };
  for (const bool flush : {false, true}) {
    PrepareOptions options;
    options.flush_subnormals = flush;
    auto model = MustPrepare(build(), options);
    ASSERT_NE(model, nullptr);
    EXPECT_DOUBLE_EQ(model->plan().layers[0].sparsity, flush ? 15.0 / 16 : 14.0 / 16);
    auto state = *model->NewState();
    const auto y = RunModel(*model, *state, {1e30f, 1, 1, 1}, 0, 1);
    EXPECT_EQ(y[0] == 0, flush) << y[0];
    EXPECT_EQ(y[1], 1);
  }
}

TEST(PreparedModelTest, RefusalsNameFileNodeAndOp) {
  formats::ModelGraph graph = MakeMlp({8, 8}, Pattern::kDense, 1);
  graph.nodes.push_back(MakeNode("Conv", {"y"}, {"z"}));
  graph.outputs[0].name = "z";
  auto model = PreparedModel::Prepare(std::move(graph), OneThread(), {});
  EXPECT_EQ(model.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(model.status().message()), HasSubstr("test.onnx: node 'z_node' (Conv)"));
  PrepareOptions negative;
  negative.max_batch_size = -1;
  EXPECT_FALSE(
      PreparedModel::Prepare(MakeMlp({8, 8}, Pattern::kDense, 1), OneThread(), negative).ok());
}

class PlanCacheUseTest : public ::testing::Test {
 protected:
  PlanCacheUseTest() {
    std::string pattern = ::testing::TempDir() + "plans_XXXXXX";
    options_.plan_cache_dir = mkdtemp(pattern.data());
    options_.max_batch_size = 8;
  }
  ~PlanCacheUseTest() override { std::filesystem::remove_all(options_.plan_cache_dir); }

  std::vector<std::filesystem::path> Files() const {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(options_.plan_cache_dir))
      files.push_back(entry.path());
    return files;
  }

  PrepareOptions options_;
};

TEST_F(PlanCacheUseTest, ASecondStartMeasuresNothingAndChoosesTheSame) {
  const auto first = MustPrepare(MakeMlp({64, 64, 32}, Pattern::kBlocks, 0.2), options_);
  EXPECT_EQ(first->plan().source, "measured");
  const auto second = MustPrepare(MakeMlp({64, 64, 32}, Pattern::kBlocks, 0.2), options_);
  EXPECT_EQ(second->plan().source, "cache");
  for (size_t i = 0; i < first->plan().layers.size(); ++i) {
    for (size_t b = 0; b < first->plan().layers[i].buckets.size(); ++b) {
      const BucketChoice& was = first->plan().layers[i].buckets[b];
      const BucketChoice& is = second->plan().layers[i].buckets[b];
      EXPECT_EQ(is.chosen.spec, was.chosen.spec);
      EXPECT_EQ(is.chosen.variant, was.chosen.variant);
      EXPECT_NEAR(is.chosen.micros, was.chosen.micros, 0.001);
    }
  }
}

TEST_F(PlanCacheUseTest, WhatWasMeasuredWithOtherThreadsIsMeasuredAgain) {
  const auto one = MakeCpuDeviceOfInstances(1), two = MakeCpuDeviceOfInstances(2);
  const auto source = [&](const Device& device) {
    return MustPrepare(MakeMlp({64, 64}, Pattern::kBlocks, 0.2), options_, device)->plan().source;
  };
  EXPECT_EQ(source(*one), "measured");
  EXPECT_EQ(source(*two), "measured");
  EXPECT_EQ(source(*one), "cache");
  EXPECT_EQ(source(*two), "cache");
}

TEST_F(PlanCacheUseTest, EqualLayersAreMeasuredOnce) {
  formats::ModelGraph graph = MakeGraph({kBatch, 64});
  graph.initializers.emplace("w1", PatternWeight(Pattern::kBlocks, 64, 64, 0.2, 1));
  Tensor w2 = PatternWeight(Pattern::kBlocks, 64, 64, 0.2, 1);
  for (int64_t i = 0; i < w2.elements(); ++i) w2.As<float>()[i] *= 2;  // other values, same pattern
  graph.initializers.emplace("w2", std::move(w2));
  graph.nodes.push_back(MakeNode("Gemm", {"x", "w1"}, {"h"}));
  graph.nodes.push_back(MakeNode("Gemm", {"h", "w2"}, {"y"}));
  const auto model = MustPrepare(std::move(graph), options_);
  ASSERT_EQ(model->plan().layers.size(), 2u);
  EXPECT_EQ(Files().size(), 1u);
  EXPECT_EQ(model->plan().layers[0].buckets[0].chosen.micros,
            model->plan().layers[1].buckets[0].chosen.micros);
}

TEST_F(PlanCacheUseTest, ADamagedFileIsMeasuredAgainAndReplaced) {
  MustPrepare(MakeMlp({64, 64}, Pattern::kBlocks, 0.2), options_);
  ASSERT_EQ(Files().size(), 1u);
  std::filesystem::resize_file(Files()[0], std::filesystem::file_size(Files()[0]) / 2);
  EXPECT_EQ(MustPrepare(MakeMlp({64, 64}, Pattern::kBlocks, 0.2), options_)->plan().source,
            "measured");
  EXPECT_EQ(MustPrepare(MakeMlp({64, 64}, Pattern::kBlocks, 0.2), options_)->plan().source,
            "cache");
}

TEST_F(PlanCacheUseTest, ManyDamagedFilesAreOneLogLine) {
  const auto build = [] { return MakeMlp({64, 48, 40, 32}, Pattern::kBlocks, 0.2); };
  MustPrepare(build(), options_);
  ASSERT_EQ(Files().size(), 3u);
  for (const auto& file : Files()) std::ofstream(file) << "garbage";
  ::testing::internal::CaptureStdout();
  const auto model = MustPrepare(build(), options_);
  const std::string log = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
  EXPECT_THAT(log,
              HasSubstr("ignoring 3 damaged or outdated files, as " + options_.plan_cache_dir));
  EXPECT_EQ(model->plan().source, "measured");
}

TEST_F(PlanCacheUseTest, ALargerBatchMeasuresOnlyWhatIsNew) {
  MustPrepare(MakeMlp({64, 64}, Pattern::kBlocks, 0.2), options_);
  options_.max_batch_size = 16;
  EXPECT_EQ(MustPrepare(MakeMlp({64, 64}, Pattern::kBlocks, 0.2), options_)->plan().source,
            "measured");
  options_.max_batch_size = 8;
  EXPECT_EQ(MustPrepare(MakeMlp({64, 64}, Pattern::kBlocks, 0.2), options_)->plan().source,
            "cache");
  EXPECT_EQ(Files().size(), 1u);
}

TEST_F(PlanCacheUseTest, WithoutTimeToMeasureTheCostModelDecides) {
  options_.measure_budget_millis = 0;
  EXPECT_EQ(MustPrepare(MakeMlp({64, 64}, Pattern::kBlocks, 0.2), options_)->plan().source,
            "cost model");
  EXPECT_TRUE(Files().empty());
}

}  // namespace
}  // namespace espalier::planner
