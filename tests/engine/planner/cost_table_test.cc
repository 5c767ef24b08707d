#include "engine/planner/cost_table.h"

#include "engine/planner/cost_model.h"
#include "engine/planner/measure.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/variants.h"
#include "tests/engine/planner/fake_table.h"

namespace espalier::planner {
namespace {

using kernels::Layout;

TEST(CostTableTest, AnUnmeasuredBucketTakesTheErrorOfTheNearestMeasuredOne) {
  const auto csr = FakeVariant("csr", Layout::kCsr), dense = FakeVariant("dense", Layout::kDense);
  CostTable table = FakeTable({{&dense, 100, {10, 10, 10, 10}}, {&csr, 100, {10, 10, 10, 10}}});
  const auto set = [&](size_t bucket, int option, double measured) {
    table.costs[bucket][option].measured = measured;
  };
  set(0, 0, 20);
  set(3, 0, 30);
  set(1, 0, 0);
  set(2, 0, 0);
  for (size_t b = 0; b < 4; ++b) set(b, 1, 0);
  table.Calibrate();
  EXPECT_EQ(table.costs[0][0].micros, 20);
  EXPECT_EQ(table.costs[1][0].micros, 20);
  EXPECT_EQ(table.costs[2][0].micros, 30);
  EXPECT_EQ(table.costs[3][0].micros, 30);
  // Never measured: as wrong as the model has been seen to be.
  EXPECT_EQ(table.costs[0][1].micros, 30);
}

TEST(CostTableTest, WithoutMeasurementsTheModelStandsAsItIs) {
  const auto dense = FakeVariant("dense", Layout::kDense);
  CostTable table = FakeTable({{&dense, 100, {10, 12}}});
  table.costs[0][0].measured = table.costs[1][0].measured = 0;
  table.Calibrate();
  EXPECT_EQ(table.costs[1][0].micros, 12);
}

TEST(CostTableTest, AnotherStructureTakesTheErrorsThatTheModelHadForTheOneBefore) {
  const auto csr = FakeVariant("csr", Layout::kCsr), dense = FakeVariant("dense", Layout::kDense),
             diagonal = FakeVariant("diagonal", Layout::kDiagonal);
  CostTable before = FakeTable({{&dense, 100, {10, 10}}, {&csr, 100, {10, 10}}});
  before.costs[0][0].measured = 20;
  before.costs[1][0].measured = 40;
  before.costs[0][1].measured = 5;
  before.costs[1][1].measured = kCannotRun;
  before.Calibrate();
  CostTable now =
      FakeTable({{&diagonal, 50, {1, 1}}, {&csr, 100, {30, 30}}, {&dense, 100, {10, 10}}});
  for (auto& bucket : now.costs) {
    for (Cost& cost : bucket) cost.measured = 0;
  }
  now.CalibrateLike(before);
  EXPECT_EQ(now.costs[0][2].micros, 20);
  EXPECT_EQ(now.costs[1][2].micros, 40);
  EXPECT_EQ(now.costs[0][1].micros, 15) << "half of what the model says, as before";
  EXPECT_EQ(now.costs[1][1].micros, kCannotRun) << "it was refused";
  EXPECT_EQ(now.costs[0][0].micros, 4) << "never seen: as wrong as the model has been";
  // And once more, from what was corrected.
  CostTable next = now;
  next.CalibrateLike(now);
  EXPECT_EQ(next.costs[0][1].micros, 15);
}

TEST(CostTableTest, DenseAndTheSmallestAreMeasuredHoweverSlowTheyLook) {
  const auto csr = FakeVariant("csr", Layout::kCsr), dense = FakeVariant("dense", Layout::kDense);
  const auto diagonal = FakeVariant("diagonal", Layout::kDiagonal),
             blocks = FakeVariant("blocks", Layout::kBlockCsr);
  const CostTable table = FakeTable(
      {{&dense, 100, {100}}, {&csr, 50, {100}}, {&diagonal, 40, {100}}, {&blocks, 60, {1}}});
  EXPECT_THAT(WorthMeasuring(table, 0), ::testing::ElementsAre(0, 2, 3));
}

TEST(CostModelTest, MoreWorkCostsMoreAndThreadsCostLess) {
  kernels::LinearDesc desc = {1, 4096, 4096, Layout::kDense};
  const int64_t stored = 4096 * 4096;
  double last = 0;
  for (const int64_t tokens : {1, 2, 16, 64, 256, 1024}) {
    desc.tokens = tokens;
    const CostEstimate estimate = EstimateLinear(desc, stored, stored * 4, 1);
    EXPECT_GE(estimate.micros, last) << ToString(estimate);
    last = estimate.micros;
    EXPECT_LE(EstimateLinear(desc, stored, stored * 4, 2).micros, estimate.micros);
    EXPECT_LT(EstimateLinear(desc, stored / 10, stored * 4 / 10, 1).micros, estimate.micros);
  }
  EXPECT_EQ(ToString(EstimateLinear({1, 10, 10, Layout::kDense}, 100, 400, 1)).substr(0, 4),
            "0.00");
}

TEST(CostModelTest, TwoFourOperandsCostWhatTheWholeWeightDoesAndGathersTheNonZeros) {
  const auto estimate = [](const std::string& name, int64_t tokens, int64_t stored) {
    for (const kernels::LinearVariant& variant : kernels::cuda::CudaLinearVariants()) {
      if (variant.name != name) continue;
      const kernels::LinearDesc desc = {
          tokens, 4096, 4096, Layout::kCsr, DType::kBFloat16, DType::kBFloat16, 1, 1, stored};
      return EstimateLinearOnGpu(desc, stored, stored * 6, &variant).micros;
    }
    ADD_FAILURE() << name;
    return 0.0;
  };
  constexpr int64_t kTenth = 4096 * 4096 / 10;
  const std::string two_four = "csr_linear_bf16_sm90_two_four",
                    gather = "csr_linear_bf16_sm90_gather";
  EXPECT_EQ(estimate(two_four, 4096, kTenth), estimate(two_four, 4096, kTenth / 2));
  EXPECT_EQ(estimate(two_four, 1, kTenth), estimate(two_four, 256, kTenth));
  EXPECT_GT(estimate(gather, 4096, kTenth), 1.9 * estimate(gather, 4096, kTenth / 2));
  EXPECT_LT(estimate(two_four, 4096, kTenth), estimate(gather, 4096, kTenth));
  EXPECT_GT(estimate(two_four, 1, kTenth), estimate(gather, 1, kTenth));
}

}  // namespace
}  // namespace espalier::planner
