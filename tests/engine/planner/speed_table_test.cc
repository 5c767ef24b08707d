#include "engine/planner/speed_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace espalier::planner {
namespace {

using sparse::ParsePattern;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::Lt;

constexpr SpeedSource kSources[] = {{"somewhere.json", "abc", "2026-01-01"}};
constexpr SpeedRow kRows[] = {
    {"diagonal(16)", DType::kBFloat16, 0.9, 16, 4096, 4096, 5, 10, 3400000},
    {"diagonal(16)", DType::kBFloat16, 0.9, 1024, 4096, 4096, 50, 40, 3400000},
    {"unstructured", DType::kFloat32, 0.9, 16, 4096, 4096, 30, 60, 13000000},
};
constexpr SpeedTable kTable = {"test", "a device", kSources, kRows};

SpeedPrediction Predict(const char* pattern, DType dtype, double sparsity,
                        const std::vector<int64_t>& tokens,
                        WeightMemory mode = WeightMemory::kBalanced, int64_t side = 4096) {
  auto prediction =
      PredictPlan(kTable, {*ParsePattern(pattern), dtype, sparsity, side, side}, tokens, mode);
  EXPECT_TRUE(prediction.ok()) << prediction.status();
  return *std::move(prediction);
}

TEST(SpeedTableTest, AMeasuredProblemIsPredictedNearlyAsMeasured) {
  const SpeedPrediction one = Predict("diagonal(16)", DType::kBFloat16, 0.9, {16});
  EXPECT_NEAR(one.plan.buckets[0].chosen.micros, 5, 0.3);
  EXPECT_NEAR(one.plan.buckets[0].dense_micros, 10, 0.5);
  EXPECT_EQ(ToString(one.plan.buckets[0].chosen.spec), "diagonal(16)");
  EXPECT_FALSE(one.plan.buckets[0].chosen.measured);
  EXPECT_NEAR(static_cast<double>(one.plan.weight_bytes), 3400000, 1);
  EXPECT_NEAR(one.doublings, 0, 1e-9);
}

TEST(SpeedTableTest, MoreTokensTakeLongerAndFewerValuesLessMemory) {
  const SpeedPrediction few = Predict("diagonal(16)", DType::kBFloat16, 0.95, {16, 4096});
  EXPECT_THAT(few.plan.sparse[1].micros, Gt(few.plan.sparse[0].micros));
  EXPECT_NEAR(few.plan.sparse[0].weight_bytes, 1700000, 2);
}

TEST(SpeedTableTest, WhatIsSlowerThanDenseRunsDense) {
  const SpeedPrediction large = Predict("diagonal(16)", DType::kBFloat16, 0.9, {1024});
  EXPECT_EQ(ToString(large.plan.buckets[0].chosen.spec), "dense");
  EXPECT_DOUBLE_EQ(large.plan.buckets[0].speedup_over_dense(), 1);
  EXPECT_EQ(large.plan.weight_bytes, large.plan.dense_bytes);
  EXPECT_THAT(large.plan.sparse[0].micros, Gt(large.plan.buckets[0].dense_micros));
}

TEST(SpeedTableTest, TheModeDecidesWhetherBothStay) {
  const SpeedPrediction fastest =
      Predict("diagonal(16)", DType::kBFloat16, 0.9, {16, 1024}, WeightMemory::kFastest);
  EXPECT_EQ(ToString(fastest.plan.buckets[0].chosen.spec), "diagonal(16)");
  EXPECT_EQ(ToString(fastest.plan.buckets[1].chosen.spec), "dense");
  EXPECT_THAT(fastest.plan.weight_bytes, Gt(fastest.plan.dense_bytes));
}

TEST(SpeedTableTest, BlocksAndDiagonalsStandInForEachOtherAndBFloat16ForFloat16) {
  EXPECT_NEAR(Predict("block(16)", DType::kFloat16, 0.9, {16}).plan.sparse[0].micros,
              Predict("diagonal(16)", DType::kBFloat16, 0.9, {16}).plan.sparse[0].micros, 0.01);
  EXPECT_EQ(ToString(Predict("2:4", DType::kFloat32, 0.5, {16}).plan.sparse[0].spec), "csr");
}

TEST(SpeedTableTest, WhatWasNotMeasuredIsRefusedWithWhatWas) {
  const auto refused =
      PredictPlan(kTable, {*ParsePattern("block(32)"), DType::kBFloat16, 0.9, 64, 64}, {1},
                  WeightMemory::kBalanced);
  EXPECT_TRUE(absl::IsNotFound(refused.status()));
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("measured in that type: diagonal(16)"));
}

TEST(SpeedTableTest, DistanceIsCountedInDoublings) {
  const SpeedPrediction far =
      Predict("diagonal(16)", DType::kBFloat16, 0.9, {16}, WeightMemory::kBalanced, 16384);
  EXPECT_NEAR(far.doublings, std::sqrt(8.0), 1e-9);
  EXPECT_EQ(far.nearest.tokens, 16);
}

TEST(SpeedTableTest, TablesOfThisBuildPredictTheirOwnRows) {
  ASSERT_FALSE(SpeedTables().empty());
  for (const SpeedTable& table : SpeedTables()) {
    EXPECT_EQ(FindSpeedTableOrNull(table.name), &table);
    for (const SpeedRow& row : table.rows) {
      ASSERT_TRUE(ParsePattern(row.pattern).ok()) << row.pattern;
      EXPECT_THAT(row.micros, Gt(0));
      EXPECT_THAT(row.sparsity, Lt(1));
    }
    const SpeedError error = SpeedTableError(table);
    EXPECT_THAT(error.half, Gt(1));
    EXPECT_THAT(error.half, Lt(2)) << table.name << " is too thin to predict from";
  }
  EXPECT_EQ(FindSpeedTableOrNull("abacus"), nullptr);
}

}  // namespace
}  // namespace espalier::planner
