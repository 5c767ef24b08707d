#include "engine/planner/weight_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/sparse/pattern.h"
#include "engine/tensor/cuda_device.h"
#include "tests/testing/fake_cuda.h"

namespace espalier::planner {
namespace {

using sparse::ParsePattern;
using sparse::Prune;
using sparse::RandomWeight;
using ::testing::Ge;
using ::testing::Gt;
using ::testing::Lt;

Tensor Pruned(const char* pattern, double sparsity, DType dtype, int64_t side = 128) {
  return *Prune(RandomWeight(dtype, side, side, 1)->view(), *ParsePattern(pattern), sparsity);
}

// On a GPU whose kernels take as long as they multiply, so that every plan is the same on every run.
class WeightPlanTest : public ::testing::Test {
 protected:
  WeightPlanTest() {
    espalier::testing::FakeCuda::Reset().micros = espalier::testing::ProportionalMicros;
    device_ = *CudaDevice::Open(espalier::testing::FakeCuda::Module(), {});
  }
  absl::StatusOr<WeightPlan> Plan(const Tensor& weight, const std::vector<int64_t>& tokens,
                                  const WeightPlanOptions& options) {
    return PlanWeight(weight.view(), tokens, *device_, options);
  }
  std::unique_ptr<CudaDevice> device_;
};

TEST_F(WeightPlanTest, ASparseWeightIsMeasuredBesideDenseAndWins) {
  const auto plan =
      Plan(Pruned("block(32)", 0.75, DType::kBFloat16), {1, 64}, {.budget = absl::Minutes(1)});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_DOUBLE_EQ(plan->sparsity, 0.75);
  EXPECT_EQ(plan->structure, "block_csr(32)");
  ASSERT_EQ(plan->buckets.size(), 2u);
  EXPECT_EQ(plan->buckets[1].batch, 64);
  EXPECT_TRUE(plan->buckets[1].chosen.measured);
  EXPECT_THAT(plan->buckets[1].speedup_over_dense(), Gt(1));
  EXPECT_EQ(plan->sparse[1].variant, plan->buckets[1].chosen.variant);
  EXPECT_THAT(plan->weight_bytes, Lt(plan->dense_bytes));
  EXPECT_EQ(plan->dense_bytes, 128 * 128 * 2u);
}

TEST_F(WeightPlanTest, AWeightWithoutZerosStaysDenseAtDenseSpeed) {
  const auto plan =
      Plan(*RandomWeight(DType::kFloat32, 64, 64, 1), {1, 16}, {.budget = absl::Minutes(1)});
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const BucketChoice& bucket : plan->buckets) {
    EXPECT_EQ(ToString(bucket.chosen.spec), "dense");
    EXPECT_DOUBLE_EQ(bucket.speedup_over_dense(), 1);
  }
}

TEST_F(WeightPlanTest, WithoutTimeTheCostModelDecides) {
  const auto plan =
      Plan(Pruned("block(32)", 0.75, DType::kBFloat16), {16}, {.budget = absl::ZeroDuration()});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_FALSE(plan->buckets[0].chosen.measured);
}

TEST_F(WeightPlanTest, AFullDeviceIsAnErrorWithSizes) {
  espalier::testing::FakeCuda::Get().memory_bytes = 100;
  const auto plan =
      Plan(Pruned("diagonal", 0.9, DType::kFloat32), {1}, {.budget = absl::Minutes(1)});
  EXPECT_TRUE(absl::IsResourceExhausted(plan.status())) << plan.status();
}

TEST(WeightPlanOnCpuTest, EveryTypeIsPlannedAndOverallNeverBelowDense) {
  const auto cpu = MakeCpuDevice(1);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const char* pattern : {"unstructured", "diagonal", "diagonal(16)", "block(32)", "2:4"}) {
      const auto plan = PlanWeight(Pruned(pattern, 0.9, dtype, 256).view(), {1, 4}, *cpu,
                                   {.budget = absl::Seconds(10)});
      ASSERT_TRUE(plan.ok()) << plan.status();
      ASSERT_EQ(plan->buckets.size(), 2u);
      // One bucket may give away what the planner tolerates (choose.h).
      for (const BucketChoice& bucket : plan->buckets)
        EXPECT_THAT(bucket.dense_micros + 3 + 0.05 * bucket.dense_micros, Ge(bucket.chosen.micros));
    }
  }
}

}  // namespace
}  // namespace espalier::planner
