// The whole path of a model on a GPU, over a device that is host memory.
#include "engine/planner/cuda_model.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "engine/tensor/cuda_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/planner/mlp_builder.h"
#include "tests/testing/fake_cuda.h"

namespace espalier::planner {
namespace {

using namespace espalier::testing;  // NOLINT(google-build-using-namespace)
using kernels::cuda::CudaKernel;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

class CudaModelTest : public ::testing::Test {
 protected:
  CudaModelTest() {
    fake_.micros = ProportionalMicros;
    auto device = CudaDevice::Open(
        FakeCuda::Module(), {.on_lost = [this](const absl::Status& status) { lost_ = status; }});
    device_ = *std::move(device);
  }

  absl::StatusOr<std::unique_ptr<PreparedModel>> Prepare(formats::ModelGraph graph,
                                                         PrepareOptions options = {}) {
    options.max_batch_size = std::min<int64_t>(options.max_batch_size, 8);
    options.measure_budget_millis = 60'000;
    return PreparedModel::Prepare(std::move(graph), *device_, options);
  }

  FakeCuda& fake_ = FakeCuda::Reset();
  absl::Status lost_;
  std::unique_ptr<CudaDevice> device_;
};

// The largest |difference| from the oracle over |expected| + 1, at several batches.
double WorstError(const PreparedModel& model, const formats::ModelGraph& graph) {
  auto state = model.NewState();
  EXPECT_TRUE(state.ok()) << state.status();
  if (!state.ok()) return INFINITY;
  double worst = 0;
  for (const int64_t batch : {1, 2, 3, 8, 5}) {
    const auto inputs = RandomInputs(graph, batch, static_cast<uint32_t>(batch));
    const auto expected = EvaluateReference(graph, inputs).at("y").data;
    const Values& x = inputs.at("x");
    ConvertElements(x.data.data(), DType::kFloat64, (*state)->input(0), model.inputs()[0].dtype,
                    static_cast<int64_t>(x.data.size()));
    const absl::Status status = model.Run(**state, batch);
    EXPECT_TRUE(status.ok()) << status;
    std::vector<double> y(expected.size());
    ConvertElements((*state)->output(0), model.outputs()[0].dtype, y.data(), DType::kFloat64,
                    static_cast<int64_t>(y.size()));
    for (size_t i = 0; i < y.size(); ++i) {
      const double error = std::abs(y[i] - expected[i]) / (1 + std::abs(expected[i]));
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
  }
  return worst;
}

TEST_F(CudaModelTest, EveryStructureTypeAndWidthMatchesTheOracle) {
  for (const Pattern pattern : {Pattern::kDense, Pattern::kBlocks, Pattern::kScattered,
                                Pattern::kDiagonal, Pattern::kZero}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      const std::vector<int64_t> widths = {70, 96, 50, 10};
      auto model = Prepare(MakeMlp(widths, pattern, 0.2, dtype));
      ASSERT_TRUE(model.ok()) << model.status();
      // Roundings to the type after every layer.
      const double tolerance = dtype == DType::kFloat32   ? 1e-5
                               : dtype == DType::kFloat16 ? 0.02
                                                          : 0.1;
      EXPECT_LT(WorstError(**model, MakeMlp(widths, pattern, 0.2, dtype)), tolerance)
          << static_cast<int>(pattern) << " " << NameOf(dtype);
    }
  }
}

// x of three items of width 4 through a model, into y.
class PartsTest : public CudaModelTest {
 protected:
  static constexpr int64_t kWidth = 4, kItems = 3;
  using Floats = std::vector<float>;

  void SetUp() override {
    auto model = Prepare(MakeMlp({kWidth, 6, kWidth}, Pattern::kDense, 1, DType::kFloat32));
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    state_ = *model_->NewState();
    for (size_t i = 0; i < x_.size(); ++i) x_[i] = static_cast<float>(i) - 5;
    expected_ = Ask();
  }
  float* input() { return static_cast<float*>(state_->input(0)); }
  // Through the buffers.
  Floats Ask() {
    std::copy(x_.begin(), x_.end(), input());
    const absl::Status status = model_->Run(*state_, kItems);
    EXPECT_TRUE(status.ok()) << status;
    const auto* y = static_cast<const float*>(state_->output(0));
    return {y, y + x_.size()};
  }
  void Read(size_t item, size_t items) {
    state_->ReadFrom(0, item * kItemBytes, items * kItemBytes, &x_[item * kWidth]);
  }
  void Write(size_t item, size_t items) {
    state_->WriteTo(0, item * kItemBytes, items * kItemBytes, &y_[item * kWidth]);
  }

  static constexpr size_t kItemBytes = kWidth * sizeof(float);
  std::unique_ptr<PreparedModel> model_;
  std::unique_ptr<ExecutionState> state_;
  Floats x_ = Floats(kItems * kWidth), y_ = Floats(kItems * kWidth, -1), expected_;
};

TEST_F(PartsTest, WholeTensorsElsewhereAreReadAndWrittenThere) {
  ASSERT_TRUE(state_->copies_anywhere());
  Read(0, kItems);
  Write(0, kItems);
  std::fill_n(input(), x_.size(), NAN);
  ASSERT_TRUE(model_->Run(*state_, kItems).ok());
  EXPECT_EQ(y_, expected_);
}

TEST_F(PartsTest, ItemsElsewhereAndItemsInTheBuffersMixAnyHow) {
  for (size_t item = 0; item < kItems; ++item) {
    std::copy(x_.begin(), x_.end(), input());
    std::fill_n(input() + item * kWidth, kWidth, NAN);
    std::fill(y_.begin(), y_.end(), -1.0f);
    Read(item, 1);
    Write((item + 1) % kItems, 1);
    ASSERT_TRUE(model_->Run(*state_, kItems).ok());
    const auto* y = static_cast<const float*>(state_->output(0));
    for (size_t i = 0; i < y_.size(); ++i) {
      const bool elsewhere = i / kWidth == (item + 1) % kItems;
      EXPECT_EQ(elsewhere ? y_[i] : y[i], expected_[i]) << item << " " << i;
      if (!elsewhere) {
        EXPECT_EQ(y_[i], -1) << "nothing else is written there";
      }
    }
  }
}

TEST_F(PartsTest, TheyHoldForOneRunOnly) {
  Read(0, kItems);
  Write(0, kItems);
  ASSERT_TRUE(model_->Run(*state_, kItems).ok());
  const Floats before = y_;
  for (float& x : x_) x = -x;
  EXPECT_NE(Ask(), before);
  EXPECT_EQ(y_, before);
}

TEST_F(PartsTest, APartBehindTheTensorIsRefusedAndForgotten) {
  state_->ReadFrom(0, 0, (kItems + 1) * kItemBytes, x_.data());
  EXPECT_EQ(model_->Run(*state_, kItems).code(), absl::StatusCode::kInternal);
  state_->WriteTo(0, SIZE_MAX, 1, y_.data());
  EXPECT_EQ(model_->Run(*state_, kItems).code(), absl::StatusCode::kInternal);
  state_->ReadFrom(0, 0, kItemBytes, x_.data());
  EXPECT_FALSE(model_->Run(*state_, 99).ok());
  EXPECT_EQ(Ask(), expected_);
}

TEST_F(CudaModelTest, ABlockPrunedModelRunsOnBlocksAndADenseOneOnDense) {
  auto sparse = Prepare(MakeMlp({256, 256, 256}, Pattern::kBlocks, 0.1, DType::kBFloat16));
  auto dense = Prepare(MakeMlp({256, 256}, Pattern::kDense, 1, DType::kBFloat16));
  ASSERT_TRUE(sparse.ok() && dense.ok());
  EXPECT_EQ((*sparse)->plan().source, "measured");
  EXPECT_THAT((*sparse)->plan().device, HasSubstr("Fake GPU"));
  for (const LayerPlan& layer : (*sparse)->plan().layers) {
    for (const BucketChoice& bucket : layer.buckets) {
      EXPECT_THAT(bucket.chosen.variant, HasSubstr("bf16_sm"));
      EXPECT_TRUE(bucket.chosen.measured);
      EXPECT_LT(bucket.chosen.micros, bucket.dense_micros);
    }
    EXPECT_LT(layer.weight_bytes, layer.dense_bytes / 4);
  }
  EXPECT_THAT((*dense)->plan().layers[0].buckets[0].chosen.variant, HasSubstr("cublaslt"));
}

TEST_F(CudaModelTest, AKernelThatRefusesItsProblemFallsToTheNext) {
  // The fake device lacks the kernels for scattered weights, which the list of variants does not know.
  auto model = Prepare(MakeMlp({256, 256}, Pattern::kScattered, 0.05, DType::kBFloat16));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_TRUE((*model)->NewState().ok());
  EXPECT_THAT((*model)->plan().layers[0].buckets[0].chosen.variant, HasSubstr("cublaslt"));
}

// bf16 layers of these widths of which every fourth block of 64 × 64 is left.
formats::ModelGraph MakeBlock64Mlp(const std::vector<int64_t>& widths) {
  formats::ModelGraph graph = MakeMlp(widths, Pattern::kDense, 1, DType::kBFloat16);
  for (size_t i = 1; i < widths.size(); ++i) {
    auto* values = graph.initializers.at("w" + std::to_string(i)).As<uint16_t>();
    for (int64_t r = 0; r < widths[i]; ++r) {
      for (int64_t c = 0; c < widths[i - 1]; ++c)
        if ((r / 64 + 3 * (c / 64)) % 4 != 0) values[r * widths[i - 1] + c] = 0;
    }
  }
  return graph;
}

TEST_F(CudaModelTest, TwoLayersRunAsOneKernelWhereThatIsFaster) {
  const std::vector<int64_t> widths = {128, 256, 128, 64};
  auto model = Prepare(MakeBlock64Mlp(widths));
  ASSERT_TRUE(model.ok()) << model.status();
  const std::vector<LayerPlan>& layers = (*model)->plan().layers;
  ASSERT_EQ(layers.size(), 3u);
  for (size_t b = 0; b < layers[0].buckets.size(); ++b) {
    EXPECT_EQ(layers[0].buckets[b].paired, "");
    EXPECT_THAT(layers[1].buckets[b].paired, HasSubstr("in one kernel with " + layers[0].name));
    EXPECT_EQ(layers[2].buckets[b].paired, "") << "the layer before it has a partner";
  }
  EXPECT_THAT(ToTable((*model)->plan()), HasSubstr("in one kernel with " + layers[0].name));
  EXPECT_THAT(ToJson((*model)->plan()), HasSubstr("\"paired\": \"in one kernel with"));
  auto state = (*model)->NewState();
  ASSERT_TRUE(state.ok());
  const int before = fake_.pair_runs;
  ASSERT_TRUE((*model)->Run(**state, 3).ok());
  EXPECT_EQ(fake_.pair_runs, before + 1);
  EXPECT_LT(WorstError(**model, MakeBlock64Mlp(widths)), 0.15) << "bf16 after every layer";
}

// x + W2 · relu(W1 · x), twice, of blocks of 64; weights are small, so that sums lose little to the type.
formats::ModelGraph MakeResidualMlp(DType dtype, int64_t width) {
  formats::ModelGraph graph = MakeBlock64Mlp({width, 128, width, 128, width});
  formats::ModelGraph typed = MakeGraph({kBatch, width}, dtype);
  for (auto& [name, tensor] : graph.initializers) {
    Tensor floats = *Convert(tensor.view(), DType::kFloat32);
    for (int64_t i = 0; i < floats.elements(); ++i) floats.As<float>()[i] /= 8;
    typed.initializers.emplace(name, *Convert(floats.view(), dtype));
  }
  const auto gemm = [&](const std::string& x, const std::string& n, const std::string& y) {
    typed.nodes.push_back(MakeNode("Gemm", {x, "w" + n, "b" + n}, {y}, {{"transB", int64_t{1}}}));
  };
  const auto block = [&](const std::string& x, const std::string& n, const std::string& m,
                         const std::string& y) {
    gemm(x, n, "g" + n);
    typed.nodes.push_back(MakeNode("Relu", {"g" + n}, {"h" + n}));
    gemm("h" + n, m, "g" + m);
    typed.nodes.push_back(MakeNode("Add", {x, "g" + m}, {y}));
  };
  block("x", "1", "2", "s");
  block("s", "3", "4", "y");
  return typed;
}

TEST_F(CudaModelTest, LayersAddTheirResidualsApartAndInPairs) {
  struct Case {
    DType dtype;
    int64_t width;
    double tolerance;
  };
  for (const auto& [dtype, width, tolerance] : {Case{DType::kBFloat16, 128, 0.05},
                                                {DType::kFloat16, 70, 0.01},
                                                {DType::kFloat32, 70, 1e-5}}) {
    auto model = Prepare(MakeResidualMlp(dtype, width));
    ASSERT_TRUE(model.ok()) << model.status();
    auto state = (*model)->NewState();
    ASSERT_TRUE(state.ok()) << state.status();
    const int before = fake_.pair_runs;
    ASSERT_TRUE((*model)->Run(**state, 3).ok());
    EXPECT_EQ(fake_.pair_runs - before, width == 128 ? 2 : 0) << NameOf(dtype);
    EXPECT_LT(WorstError(**model, MakeResidualMlp(dtype, width)), tolerance) << NameOf(dtype);
  }
}

TEST_F(CudaModelTest, DeterministicModelsAndWideLayersHaveNoPairs) {
  for (const bool deterministic : {true, false}) {
    const int64_t out =
        deterministic ? 128 : 64 * 25;  // more accumulators than a multiprocessor has
    auto model = Prepare(MakeBlock64Mlp({128, 256, out}), {.deterministic = deterministic});
    ASSERT_TRUE(model.ok()) << model.status();
    for (const BucketChoice& bucket : (*model)->plan().layers[1].buckets)
      EXPECT_EQ(bucket.paired, "");
  }
  EXPECT_EQ(fake_.pair_runs, 0);
}

TEST_F(CudaModelTest, ACloneHasMemoryOfItsOwnAndAnswersTheSame) {
  const std::vector<int64_t> widths = {128, 256, 128, 64};
  auto model = Prepare(MakeBlock64Mlp(widths));
  ASSERT_TRUE(model.ok()) << model.status();
  const size_t alone = fake_.allocated_bytes();
  auto clone = (*model)->Clone();
  ASSERT_TRUE(clone.ok()) << clone.status();
  EXPECT_EQ(fake_.allocated_bytes(), 2 * alone);
  EXPECT_EQ((*clone)->weight_bytes(), (*model)->weight_bytes());
  EXPECT_EQ(ToJson((*clone)->plan()), ToJson((*model)->plan()));
  const double error = WorstError(**model, MakeBlock64Mlp(widths));
  model->reset();
  EXPECT_EQ(WorstError(**clone, MakeBlock64Mlp(widths)), error);
  clone->reset();
  EXPECT_TRUE(fake_.allocations.empty());
  EXPECT_EQ(fake_.live_handles, 0);
}

TEST_F(CudaModelTest, PrecisionDecidesWhatIsComputedIn) {
  const auto graph = [] { return MakeMlp({64, 64}, Pattern::kBlocks, 0.2); };
  auto strict = Prepare(graph());
  auto rounded = Prepare(graph(), {.precision = formats::Precision::kBFloat16});
  ASSERT_TRUE(strict.ok() && rounded.ok()) << strict.status() << rounded.status();
  EXPECT_LT(WorstError(**strict, graph()), 1e-6);
  const double error = WorstError(**rounded, graph());
  EXPECT_GT(error, 1e-4);
  EXPECT_LT(error, 2e-2);
  EXPECT_EQ((*rounded)->inputs()[0].dtype, DType::kFloat32) << "the signature stays";
}

TEST_F(CudaModelTest, EqualLayersAreMeasuredOnceAndEveryBucketIsOneGraph) {
  const auto prepare = [&](int layers) {
    const int before = fake_.captures;
    auto graph =
        MakeMlp(std::vector<int64_t>(layers + 1, 128), Pattern::kBlocks, 0.2, DType::kBFloat16);
    for (int i = 2; i <= layers; ++i) graph.initializers.erase("w" + std::to_string(i));
    for (auto& node : graph.nodes) {
      if (node.op_type == "Gemm") node.inputs[1] = "w1";
    }
    auto model = Prepare(std::move(graph));
    EXPECT_TRUE(model.ok()) << model.status();
    const int measuring = fake_.captures - before;
    auto state = (*model)->NewState();
    EXPECT_TRUE(state.ok());
    EXPECT_EQ(fake_.captures - before - measuring, 4) << "batches 1, 2, 4, 8";
    const int launched = fake_.launches;
    EXPECT_TRUE((*model)->Run(**state, 3).ok());
    EXPECT_EQ(fake_.launches - launched, 1);
    return measuring;
  };
  EXPECT_EQ(prepare(1), prepare(4));
}

TEST_F(CudaModelTest, EveryGraphHasRunBeforeAnybodyIsServed) {
  auto model = Prepare(MakeMlp({64, 64}, Pattern::kDense, 1));
  ASSERT_TRUE(model.ok());
  const int launched = fake_.launches;
  ASSERT_TRUE((*model)->NewState().ok());
  EXPECT_EQ(fake_.launches - launched, 4);
}

TEST_F(CudaModelTest, WorkOfTimedRunsIsWhatNonZerosAndItemsComeTo) {
  auto model =
      Prepare(MakeMlp({128, 64}, Pattern::kDense, 1, DType::kBFloat16), {.measure_peak = true});
  ASSERT_TRUE(model.ok()) << model.status();
  auto state = (*model)->NewState();
  ASSERT_TRUE(state.ok());
  EXPECT_EQ((*model)->device_work().seconds, 0) << "nothing was asked for yet";
  for (int run = 0; run < 17; ++run) ASSERT_TRUE((*model)->Run(**state, 3).ok());
  // The first and the seventeenth were timed.
  const DeviceWork work = (*model)->device_work();
  const double items = 2 * 3;
  EXPECT_DOUBLE_EQ(work.flops, items * 2 * 128 * 64);
  EXPECT_DOUBLE_EQ(work.bytes, items * 2 * (128 + 64) +
                                   2.0 * (*model)->plan().layers[0].buckets[2].chosen.weight_bytes);
  EXPECT_NEAR(work.seconds, 2 * 1e-6 * (1 + 4 * 128 * 64 * 1e-6), 2e-8)
      << "ProportionalMicros at batch 4";
  EXPECT_GT(work.peak.flops, 0);
}

TEST_F(CudaModelTest, APlanIsKeptByDevice) {
  std::string directory = ::testing::TempDir() + "/cuda_plans_XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  const auto source = [&](CudaDevice& device) {
    PrepareOptions options{.max_batch_size = 4, .plan_cache_dir = directory};
    auto model = PreparedModel::Prepare(MakeMlp({64, 64}, Pattern::kBlocks, 0.2, DType::kBFloat16),
                                        device, options);
    EXPECT_TRUE(model.ok()) << model.status();
    return (*model)->plan().source;
  };
  EXPECT_EQ(source(*device_), "measured");
  EXPECT_EQ(source(*device_), "cache");
  auto portable = CudaDevice::Open(FakeCuda::Module(), {.portable = true});
  EXPECT_EQ(source(**portable), "measured");
  std::filesystem::remove_all(directory);
}

TEST_F(CudaModelTest, WithoutMemoryTheLoadIsRefusedAndNothingStays) {
  fake_.memory_bytes = 100'000;
  auto model = Prepare(MakeMlp({512, 512}, Pattern::kDense, 1));
  EXPECT_TRUE(absl::IsResourceExhausted(model.status())) << model.status();
  EXPECT_THAT(std::string(model.status().message()),
              AllOf(HasSubstr("1048576 bytes"), HasSubstr("of 100000 are free")));
  EXPECT_TRUE(fake_.allocations.empty());
  EXPECT_EQ(fake_.live_handles, 0);
}

TEST_F(CudaModelTest, AModelLeavesNothingBehind) {
  {
    auto model = Prepare(MakeMlp({64, 48, 10}, Pattern::kBlocks, 0.3, DType::kFloat16));
    ASSERT_TRUE(model.ok());
    auto state = (*model)->NewState();
    ASSERT_TRUE(state.ok());
    EXPECT_GT((*state)->arena_bytes(), 0u);
    EXPECT_GT((*model)->weight_bytes(), 0u);
    EXPECT_FALSE(fake_.allocations.empty());
  }
  EXPECT_TRUE(fake_.allocations.empty());
  EXPECT_EQ(fake_.live_handles, 0);
}

TEST_F(CudaModelTest, ALostDeviceFailsTheBatchWithTextAndIsTold) {
  auto model = Prepare(MakeMlp({64, 64}, Pattern::kDense, 1));
  ASSERT_TRUE(model.ok());
  auto state = (*model)->NewState();
  ASSERT_TRUE(state.ok());
  EXPECT_TRUE((*model)->Run(**state, 1).ok());
  fake_.broken = "an illegal memory access was encountered";
  const absl::Status status = (*model)->Run(**state, 1);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("illegal memory access"));
  EXPECT_EQ(lost_.message(), status.message());
  fake_.broken
      .clear();  // a device that stays lost keeps its memory, which LeakSanitizer would find
}

TEST_F(CudaModelTest, OtherOpsRunOnTheDeviceToo) {
  const auto build = [] {
    formats::ModelGraph graph = MakeGraph({kBatch, 6, 10});
    graph.initializers.emplace("scale", MakeTensor(DType::kFloat32, {10}, RandomData(10, 1)));
    graph.initializers.emplace("shift", MakeTensor(DType::kFloat32, {10}, RandomData(10, 2)));
    graph.initializers.emplace("w", MakeTensor(DType::kFloat32, {6, 9}, RandomData(54, 3)));
    graph.nodes.push_back(MakeNode("LayerNormalization", {"x", "scale", "shift"}, {"n"}));
    graph.nodes.push_back(
        MakeNode("Transpose", {"n"}, {"t"}, {{"perm", std::vector<int64_t>{0, 2, 1}}}));
    graph.nodes.push_back(MakeNode("MatMul", {"t", "w"}, {"m"}));
    graph.nodes.push_back(MakeNode("Sigmoid", {"m"}, {"s"}));
    graph.nodes.push_back(MakeNode("Mul", {"m", "s"}, {"p"}));
    graph.nodes.push_back(MakeNode("Softmax", {"p"}, {"y"}));
    return graph;
  };
  for (const auto precision : {formats::Precision::kAsStored, formats::Precision::kBFloat16}) {
    auto model = Prepare(build(), {.precision = precision});
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_LT(WorstError(**model, build()),
              precision == formats::Precision::kBFloat16 ? 0.03 : 1e-5);
  }
}

}  // namespace
}  // namespace espalier::planner
