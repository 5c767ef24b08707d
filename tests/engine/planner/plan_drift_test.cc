// PreparedModel::PlanDrifted: a model whose weights change structure gets the plan that a load would make now.
#include "engine/planner/plan_drift.h"

#include <algorithm>
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
using kernels::Layout;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Mutate = std::function<void(Tensor&)>;

constexpr int64_t kMaxBatch = 8;
// Of sums of 256 terms, in f32 and in bf16, relative to the largest.
constexpr double kTolerance = 2e-5, kTolerance16 = 2e-2;

class NoWeights final : public formats::WeightSource {
 public:
  bool Has(const std::string&) const override { return true; }
  absl::Status Read(const std::string&, Tensor&) const override {
    return absl::ResourceExhaustedError("no memory, as asked for");
  }
};

std::vector<std::string> ChoicesOf(const PreparedModel& model) {
  std::vector<std::string> choices;
  for (const LayerPlan& layer : model.plan().layers) {
    for (const BucketChoice& bucket : layer.buckets)
      choices.push_back(
          absl::StrCat(sparse::ToString(bucket.chosen.spec), " ", bucket.chosen.variant));
  }
  return choices;
}

// A model that is trained on, step by step.
class Trained {
 public:
  Trained(std::function<formats::ModelGraph()> build, const Device& device, PrepareOptions options)
      : build_(std::move(build)),
        device_(device),
        options_(std::move(options)),
        now_(build_()),
        model_(Prepare()),
        state_(*model_->NewState()) {}

  PreparedModel& model() { return *model_; }
  const formats::ModelGraph& now() const { return now_; }
  Layout layout(int layer = 0) const {
    return model_->plan().layers[layer].buckets[0].chosen.spec.layout;
  }
  // Edits only.
  void Change(const std::string& weight, const Mutate& mutate) {
    const formats::ModelGraph before = Copy();
    mutate(now_.initializers.at(weight));
    const absl::Status status = model_->Edit(Changes(before, now_).edits(), GraphWeights(now_));
    ASSERT_TRUE(status.ok()) << status;
  }
  std::vector<WeightReplan> Plan() {
    auto replans = model_->PlanDrifted(GraphWeights(now_));
    ExpectRight();
    return replans;
  }
  void ExpectRight(double tolerance = kTolerance) {
    ExpectRight(*model_, *state_, tolerance);  // from before
    ExpectRight(*model_, **model_->NewState(), tolerance);
  }
  void ExpectRight(const PreparedModel& model, ExecutionState& state, double tolerance) const {
    const int64_t in = model.inputs()[0].shape.back();
    for (const int64_t batch : {1, 5}) {
      const int64_t out = model.outputs()[0].shape.back();
      const auto x = RandomData(batch * in, 9);
      const auto expected = EvaluateReference(now_, {{"x", {{batch, in}, x}}}).at("y").data;
      ConvertElements(x.data(), DType::kFloat64, state.input(0), model.inputs()[0].dtype,
                      batch * in);
      const absl::Status status = model.Run(state, batch);
      ASSERT_TRUE(status.ok()) << status;
      std::vector<double> got(batch * out);
      ConvertElements(state.output(0), model.outputs()[0].dtype, got.data(), DType::kFloat64,
                      batch * out);
      double largest = 0;
      for (const double y : expected) largest = std::max(largest, std::abs(y));
      for (size_t i = 0; i < expected.size(); ++i)
        ASSERT_NEAR(got[i], expected[i], tolerance * largest);
    }
  }
  // As a load of what it is now.
  void ExpectPlanOfALoad() {
    const auto fresh = Prepare();
    EXPECT_EQ(ChoicesOf(*model_), ChoicesOf(*fresh));
    EXPECT_EQ(model_->weight_bytes(), fresh->weight_bytes());
    EXPECT_EQ(model_->plan().weight_bytes, fresh->plan().weight_bytes);
    EXPECT_EQ(model_->dense_weight_bytes(), fresh->dense_weight_bytes());
    for (size_t i = 0; i < fresh->plan().layers.size(); ++i) {
      EXPECT_EQ(model_->plan().layers[i].structure, fresh->plan().layers[i].structure);
      EXPECT_EQ(model_->plan().layers[i].sparsity, fresh->plan().layers[i].sparsity);
      EXPECT_EQ(model_->plan().layers[i].weight_bytes, fresh->plan().layers[i].weight_bytes);
      EXPECT_EQ(model_->plan().layers[i].name, fresh->plan().layers[i].name);
    }
  }

 private:
  formats::ModelGraph Copy() const {
    formats::ModelGraph copy = build_();
    for (auto& [name, tensor] : copy.initializers)
      std::memcpy(tensor.data(), now_.initializers.at(name).data(), tensor.bytes());
    return copy;
  }
  std::unique_ptr<PreparedModel> Prepare() const {
    auto model = PreparedModel::Prepare(Copy(), device_, options_);
    EXPECT_TRUE(model.ok()) << model.status();
    return *std::move(model);
  }

  const std::function<formats::ModelGraph()> build_;
  const Device& device_;
  const PrepareOptions options_;
  formats::ModelGraph now_;
  std::unique_ptr<PreparedModel> model_;
  std::unique_ptr<ExecutionState> state_;
};

class PlanDriftTest : public ::testing::Test {
 protected:
  PlanDriftTest() {
    FakeCuda::Reset().micros = ProportionalMicros;
    gpu_ = *CudaDevice::Open(FakeCuda::Module(), {});
  }
  static PrepareOptions Unmeasured() {
    PrepareOptions options;
    options.max_batch_size = kMaxBatch;
    options.measure_budget_millis = 0;
    return options;
  }
  // For the fake device, which lacks kernels; to the end, however slow this machine is.
  static PrepareOptions Measured() {
    PrepareOptions options;
    options.max_batch_size = kMaxBatch;
    options.measure_budget_millis = 1'000'000;
    return options;
  }
  static std::function<formats::ModelGraph()> Mlp(Pattern pattern, double density) {
    return [=] { return MakeMlp({256, 256, 128}, pattern, density); };
  }
  Mutate By(Change change, double share) {
    return [this, change, share](Tensor& tensor) { Apply(change, share, tensor, random_); };
  }

  std::unique_ptr<Device> cpu_ = MakeCpuDevice(1);
  std::unique_ptr<CudaDevice> gpu_;
  std::mt19937 random_{5};
};

TEST_F(PlanDriftTest, BlocksThatScatterGetThePlanOfALoad) {
  Trained trained(Mlp(Pattern::kBlocks, 0.1), *cpu_, Unmeasured());
  ASSERT_EQ(trained.layout(), Layout::kBlockCsr);
  trained.Change("w1", By(Change::kGrow, 0.9));
  EXPECT_EQ(trained.layout(), Layout::kBlockCsr) << "until the planner is asked";
  trained.ExpectRight();
  const auto replans = trained.Plan();
  ASSERT_EQ(replans.size(), 1u);
  EXPECT_TRUE(replans[0].status.ok());
  EXPECT_TRUE(replans[0].changed);
  EXPECT_EQ(replans[0].weight, "w1");
  EXPECT_THAT(replans[0].before, HasSubstr("block_csr"));
  EXPECT_EQ(replans[0].after, "dense");
  EXPECT_GT(replans[0].moved, 1);
  EXPECT_EQ(trained.layout(0), Layout::kDense);
  EXPECT_EQ(trained.layout(1), Layout::kBlockCsr) << "which did not drift";
  trained.ExpectPlanOfALoad();
  EXPECT_THAT(trained.Plan(), IsEmpty()) << "it was asked";
}

TEST_F(PlanDriftTest, EveryStructureThatBecomesAnotherGetsThePlanOfALoad) {
  const std::vector<Pattern> patterns = {Pattern::kDense, Pattern::kDiagonal, Pattern::kBlocks,
                                         Pattern::kScattered, Pattern::kZero};
  int changed = 0;
  for (const WeightMemory mode :
       {WeightMemory::kSmallest, WeightMemory::kBalanced, WeightMemory::kFastest}) {
    PrepareOptions options = Unmeasured();
    options.weight_memory = mode;
    for (const Pattern from : patterns) {
      Trained trained(Mlp(from, 0.05), *cpu_, options);
      for (const Pattern to : patterns) {
        SCOPED_TRACE(absl::StrCat(static_cast<int>(from), " to ", static_cast<int>(to)));
        for (const char* name : {"w1", "w2"}) {
          trained.Change(name, [&](Tensor& tensor) {
            const Tensor next =
                PatternWeight(to, tensor.shape()[0], tensor.shape()[1], 0.04, name[1]);
            std::memcpy(tensor.data(), next.data(), next.bytes());
          });
        }
        for (const WeightReplan& replan : trained.Plan()) {
          EXPECT_TRUE(replan.status.ok()) << replan.status;
          changed += replan.changed ? 1 : 0;
        }
        trained.ExpectPlanOfALoad();
      }
    }
  }
  EXPECT_GT(changed, 100);
}

TEST_F(PlanDriftTest, ChangedValuesAndSignsOfZerosAreNoDrift) {
  Trained trained(Mlp(Pattern::kBlocks, 0.1), *cpu_, Unmeasured());
  trained.Change("w1", By(Change::kValue, 1));
  trained.Change("w2", By(Change::kSign, 1));
  EXPECT_THAT(trained.Plan(), IsEmpty());
}

TEST_F(PlanDriftTest, SmallMovesAddUpOverUpdates) {
  Trained trained(Mlp(Pattern::kScattered, 0.1), *cpu_, Unmeasured());
  ASSERT_EQ(trained.layout(), Layout::kCsr);
  int steps = 0;
  std::vector<WeightReplan> replans;
  for (; replans.empty() && steps < 10; ++steps) {
    trained.Change("w1", By(Change::kDrop, 0.04));
    replans = trained.Plan();
  }
  EXPECT_EQ(steps, 3);
  ASSERT_EQ(replans.size(), 1u);
  EXPECT_GE(replans[0].moved, kDriftShare);
  EXPECT_LT(replans[0].moved, 2 * kDriftShare);
}

TEST_F(PlanDriftTest, APlanThatIsStillRightStays) {
  Trained trained(Mlp(Pattern::kScattered, 0.1), *cpu_, Unmeasured());
  trained.Change("w1", By(Change::kDrop, 0.08));
  trained.Change("w1", By(Change::kGrow, 0.008));
  const auto replans = trained.Plan();
  ASSERT_EQ(replans.size(), 1u);
  EXPECT_TRUE(replans[0].status.ok());
  EXPECT_FALSE(replans[0].changed);
  EXPECT_EQ(replans[0].before, "csr");
  EXPECT_EQ(replans[0].after, "csr");
  EXPECT_THAT(trained.Plan(), IsEmpty()) << "what moved was looked at";
}

TEST_F(PlanDriftTest, ZerosThatStayedStoredGoWhenTheyAreTooMany) {
  Trained trained(Mlp(Pattern::kScattered, 0.1), *cpu_, Unmeasured());
  const size_t bytes = trained.model().weight_bytes();
  trained.Change("w1", By(Change::kDrop, 0.5));
  EXPECT_EQ(trained.model().weight_bytes(), bytes);
  const auto replans = trained.Plan();
  ASSERT_EQ(replans.size(), 1u);
  EXPECT_TRUE(replans[0].changed);
  EXPECT_EQ(replans[0].after, "csr");
  EXPECT_LT(trained.model().weight_bytes(), bytes);
  trained.ExpectPlanOfALoad();
}

TEST_F(PlanDriftTest, AWeightThatCannotBePlannedRunsAsBeforeAndIsNotAskedForEveryTime) {
  Trained trained(Mlp(Pattern::kBlocks, 0.1), *cpu_, Unmeasured());
  trained.Change("w1", By(Change::kGrow, 0.9));
  const auto before = ChoicesOf(trained.model());
  const size_t bytes = trained.model().weight_bytes();
  auto replans = trained.model().PlanDrifted(NoWeights());
  ASSERT_EQ(replans.size(), 1u);
  EXPECT_EQ(replans[0].weight, "w1");
  EXPECT_EQ(replans[0].status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(replans[0].changed);
  EXPECT_EQ(ChoicesOf(trained.model()), before);
  EXPECT_EQ(trained.model().weight_bytes(), bytes);
  trained.ExpectRight();
  EXPECT_THAT(trained.Plan(), IsEmpty());
  trained.Change("w1", By(Change::kDrop, 0.5));
  replans = trained.Plan();
  ASSERT_EQ(replans.size(), 1u);
  EXPECT_TRUE(replans[0].changed);
  trained.ExpectPlanOfALoad();
}

TEST_F(PlanDriftTest, AModelThatWasPlannedAnewIsClonedAndEditedLikeAnother) {
  Trained trained(Mlp(Pattern::kBlocks, 0.1), *cpu_, Unmeasured());
  trained.Change("w1", By(Change::kGrow, 0.9));
  auto unplanned = *trained.model().Clone();
  ASSERT_EQ(trained.Plan().size(), 1u);
  auto clone = *trained.model().Clone();
  EXPECT_EQ(ChoicesOf(*clone), ChoicesOf(trained.model()));
  trained.ExpectRight(*clone, **clone->NewState(), kTolerance);
  // What moved goes along with a clone.
  EXPECT_EQ(unplanned->PlanDrifted(GraphWeights(trained.now())).size(), 1u);
  trained.ExpectRight(*unplanned, **unplanned->NewState(), kTolerance);
  EXPECT_THAT(clone->PlanDrifted(GraphWeights(trained.now())), IsEmpty());
  trained.Change("w1", By(Change::kValue, 0.5));
  trained.ExpectRight();
}

TEST_F(PlanDriftTest, InDeterministicModeEditsSeeToIt) {
  PrepareOptions options = Unmeasured();
  options.deterministic = true;
  Trained trained(Mlp(Pattern::kScattered, 0.1), *cpu_, options);
  trained.Change("w1", By(Change::kDrop, 0.3));
  EXPECT_THAT(trained.Plan(), IsEmpty());
}

TEST_F(PlanDriftTest, AWeightAndItsTransposeArePlannedEach) {
  const auto build = [] {
    formats::ModelGraph graph = MakeGraph({kBatch, 256});
    graph.initializers.emplace("w", PatternWeight(Pattern::kScattered, 128, 256, 0.05, 3));
    graph.nodes.push_back(MakeNode("Gemm", {"x", "w"}, {"h"}, {{"transB", int64_t{1}}}));
    graph.nodes.push_back(MakeNode("Gemm", {"h", "w"}, {"y"}));
    return graph;
  };
  Trained trained(build, *cpu_, Unmeasured());
  ASSERT_EQ(trained.layout(), Layout::kCsr);
  trained.Change("w", [](Tensor& tensor) {
    for (int64_t i = 0; i < tensor.elements(); ++i) tensor.As<float>()[i] = 0.01f;
  });
  const auto replans = trained.Plan();
  ASSERT_EQ(replans.size(), 2u);
  EXPECT_TRUE(replans[0].changed && replans[1].changed);
  trained.ExpectPlanOfALoad();
}

TEST_F(PlanDriftTest, AGpuRunsTheNewPlanInGraphsCapturedAnew) {
  PrepareOptions options = Measured();
  options.precision = formats::Precision::kBFloat16;
  Trained trained(Mlp(Pattern::kBlocks, 0.1), *gpu_, options);
  ASSERT_EQ(trained.layout(), Layout::kBlockCsr);
  trained.Change("w1", By(Change::kGrow, 0.9));
  trained.ExpectRight(kTolerance16);
  const int captures = FakeCuda::Get().captures;
  const auto replans = trained.model().PlanDrifted(GraphWeights(trained.now()));
  ASSERT_EQ(replans.size(), 1u);
  EXPECT_TRUE(replans[0].changed) << replans[0].status;
  EXPECT_EQ(trained.layout(), Layout::kDense);
  trained.ExpectRight(kTolerance16);
  EXPECT_GT(FakeCuda::Get().captures, captures);
  trained.ExpectPlanOfALoad();
}

TEST_F(PlanDriftTest, AGpusKernelThatRefusesLeavesTheWeightAsItWas) {
  PrepareOptions options = Measured();
  options.weight_memory = WeightMemory::kSmallest;
  const auto build = [] { return MakeMlp({256, 256}, Pattern::kDense, 1, DType::kBFloat16); };
  Trained trained(build, *gpu_, options);
  ASSERT_EQ(trained.layout(), Layout::kDense);
  // The fake device lacks the kernels for scattered weights, which the list of variants does not know.
  trained.Change("w1", By(Change::kDrop, 0.97));
  const size_t bytes = trained.model().weight_bytes();
  const auto replans = trained.model().PlanDrifted(GraphWeights(trained.now()));
  ASSERT_EQ(replans.size(), 1u);
  EXPECT_THAT(std::string(replans[0].status.message()), HasSubstr("no such kernel"));
  EXPECT_EQ(trained.layout(), Layout::kDense);
  EXPECT_EQ(trained.model().weight_bytes(), bytes);
  trained.ExpectRight(kTolerance16);
}

TEST_F(PlanDriftTest, APairOfWhichALayerIsPlannedAnewFallsApart) {
  PrepareOptions options = Measured();
  const auto build = [] {
    formats::ModelGraph graph = MakeMlp({128, 256, 128}, Pattern::kDense, 1, DType::kBFloat16);
    for (const char* name : {"w1", "w2"}) {  // every fourth block of 64 x 64 is left
      Tensor& weight = graph.initializers.at(name);
      const int64_t rows = weight.shape()[0], cols = weight.shape()[1];
      for (int64_t i = 0; i < rows * cols; ++i)
        if ((i / cols / 64 + 3 * (i % cols / 64)) % 4 != 0) SetBits(weight, i, 0);
    }
    return graph;
  };
  Trained trained(build, *gpu_, options);
  const std::vector<LayerPlan>& layers = trained.model().plan().layers;
  ASSERT_THAT(layers[1].buckets[0].paired, HasSubstr("in one kernel with"));
  trained.Change("w1", By(Change::kGrow, 1));
  const auto replans = trained.model().PlanDrifted(GraphWeights(trained.now()));
  ASSERT_EQ(replans.size(), 1u);
  EXPECT_TRUE(replans[0].changed) << replans[0].status;
  for (const LayerPlan& layer : layers) {
    for (const BucketChoice& bucket : layer.buckets) EXPECT_EQ(bucket.paired, "");
  }
  const int pair_runs = FakeCuda::Get().pair_runs;
  trained.ExpectRight(kTolerance16);
  EXPECT_EQ(FakeCuda::Get().pair_runs, pair_runs);
}

TEST_F(PlanDriftTest, EveryReplicaIsPlannedAnew) {
  const auto build = Mlp(Pattern::kBlocks, 0.1);
  std::vector<std::unique_ptr<PreparedModel>> replicas;
  for (int i = 0; i < 2; ++i)
    replicas.push_back(*PreparedModel::Prepare(build(), *cpu_, Unmeasured()));
  const std::vector<PreparedModel*> each = {replicas[0].get(), replicas[1].get()};
  auto model = MakeReplicatedModel(std::move(replicas), {0, 1});
  formats::ModelGraph after = build();
  Apply(Change::kGrow, 0.9, after.initializers.at("w1"), random_);
  ASSERT_TRUE(model->Edit(Changes(build(), after).edits(), GraphWeights(after)).ok());
  EXPECT_EQ(model->PlanDrifted(GraphWeights(after)).size(), 1u);
  for (const PreparedModel* replica : each)
    EXPECT_EQ(replica->plan().layers[0].buckets[0].chosen.spec.layout, Layout::kDense);
}

}  // namespace
}  // namespace espalier::planner
