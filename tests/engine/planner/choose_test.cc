#include "engine/planner/choose.h"

#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/planner/fake_table.h"

namespace espalier::planner {
namespace {

using kernels::Layout;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

const auto kDense = FakeVariant("dense", Layout::kDense, "packed", false);
const auto kDenseInvariant = FakeVariant("dense_invariant", Layout::kDense, "packed", true);
const auto kCsr = FakeVariant("csr", Layout::kCsr);
const auto kCsrWide = FakeVariant("csr_wide", Layout::kCsr, "wide");
const auto kDiagonal = FakeVariant("diagonal", Layout::kDiagonal);
const auto kBlocks = FakeVariant("blocks", Layout::kBlockCsr);

TEST(ChooseTest, FastestTakesTheCheapestOfEveryBucketWhateverTheMemory) {
  const CostTable table = FakeTable(
      {{&kDense, 1000, {10, 20, 30}}, {&kCsr, 900, {1, 25, 60}}, {&kDiagonal, 900, {5, 15, 40}}});
  EXPECT_THAT(ChooseOptions(table, WeightMemory::kFastest, false, 1000), ElementsAre(1, 2, 0));
}

TEST(ChooseTest, BalancedTakesOneLayoutThatIsNowhereSlowerThanDense) {
  const CostTable table = FakeTable(
      {{&kDense, 1000, {10, 20, 30}}, {&kCsr, 600, {1, 2, 31}}, {&kDiagonal, 600, {9, 15, 29}}});
  EXPECT_THAT(ChooseOptions(table, WeightMemory::kBalanced, false, 1000), ElementsAre(2, 2, 2));
}

TEST(ChooseTest, BalancedFallsBackToDense) {
  const CostTable table = FakeTable({{&kDense, 1000, {10, 20, 30}}, {&kCsr, 600, {1, 2, 31}}});
  EXPECT_THAT(ChooseOptions(table, WeightMemory::kBalanced, false, 1000), ElementsAre(0, 0, 0));
}

TEST(ChooseTest, BalancedKeepsASecondLayoutOnlyWithinTheDenseBytes) {
  const std::vector<double> early = {1, 10, 29}, late = {9, 10, 10};
  const CostTable fits =
      FakeTable({{&kDense, 1000, {10, 20, 30}}, {&kCsr, 500, early}, {&kDiagonal, 500, late}});
  EXPECT_THAT(ChooseOptions(fits, WeightMemory::kBalanced, false, 1000), ElementsAre(1, 1, 2));
  const CostTable too_large =
      FakeTable({{&kDense, 1000, {10, 20, 30}}, {&kCsr, 501, early}, {&kDiagonal, 500, late}});
  EXPECT_THAT(ChooseOptions(too_large, WeightMemory::kBalanced, false, 1000), ElementsAre(1, 1, 1));
}

TEST(ChooseTest, BalancedKeepsNoSecondLayoutForASmallGain) {
  const CostTable table = FakeTable({{&kDense, 1000, {10, 20, 30}},
                                     {&kCsr, 300, {5.0, 10, 15}},
                                     {&kDiagonal, 300, {5.2, 10.2, 14.5}}});
  EXPECT_THAT(ChooseOptions(table, WeightMemory::kBalanced, false, 1000), ElementsAre(1, 1, 1));
}

TEST(ChooseTest, KernelsThatReadTheSameBytesShareOneCopy) {
  const auto second = FakeVariant("csr_few_tokens", Layout::kCsr);
  const CostTable table = FakeTable({{&kDense, 1000, {10, 20, 30}},
                                     {&kCsr, 900, {8, 9, 10}},
                                     {&second, 900, {1, 2, kCannotRun}}});
  EXPECT_THAT(ChooseOptions(table, WeightMemory::kBalanced, false, 1000), ElementsAre(2, 2, 1));
  EXPECT_THAT(ChooseOptions(table, WeightMemory::kSmallest, false, 1000), ElementsAre(2, 2, 1));
}

TEST(ChooseTest, SmallestTakesTheFewestBytesEvenWhereItIsSlower) {
  const CostTable table = FakeTable(
      {{&kDense, 1000, {10, 20, 30}}, {&kCsr, 200, {20, 40, 90}}, {&kDiagonal, 203, {1, 2, 3}}});
  EXPECT_THAT(ChooseOptions(table, WeightMemory::kSmallest, false, 1000), ElementsAre(1, 1, 1));
}

TEST(ChooseTest, SmallestTakesTheFastestOfEquallySmallLayouts) {
  const CostTable table = FakeTable(
      {{&kDense, 1000, {10, 20, 30}}, {&kCsr, 200, {20, 40, 90}}, {&kDiagonal, 202, {1, 2, 3}}});
  EXPECT_THAT(ChooseOptions(table, WeightMemory::kSmallest, false, 1000), ElementsAre(2, 2, 2));
}

TEST(ChooseTest, DeterministicIsOneBatchInvariantKernelForAllBuckets) {
  const auto second = FakeVariant("csr_few_tokens", Layout::kCsr);
  const CostTable table = FakeTable({{&kDense, 1000, {1, 1, 1}},
                                     {&kDenseInvariant, 1000, {10, 20, 30}},
                                     {&kCsr, 600, {8, 9, 10}},
                                     {&second, 600, {1, 2, kCannotRun}},
                                     {&kDiagonal, 500, {30, 30, 30}}});
  // The dense kernel that is not batch-invariant beats all, so "not slower than dense" leaves the
  // least slow one.
  EXPECT_THAT(ChooseOptions(table, WeightMemory::kBalanced, true, 1000), ElementsAre(2, 2, 2));
  EXPECT_THAT(ChooseOptions(table, WeightMemory::kSmallest, true, 1000), ElementsAre(4, 4, 4));
}

TEST(ChooseTest, NothingIsChosenWhenNoKernelRunsEverywhere) {
  const CostTable table = FakeTable({{&kCsr, 600, {8, kCannotRun}}});
  for (const WeightMemory mode :
       {WeightMemory::kSmallest, WeightMemory::kBalanced, WeightMemory::kFastest}) {
    EXPECT_THAT(ChooseOptions(table, mode, false, 1000), IsEmpty());
    EXPECT_THAT(ChooseOptions(table, mode, true, 1000), IsEmpty());
  }
  EXPECT_THAT(
      ChooseOptions(FakeTable({{&kDense, 600, {8, 9}}}), WeightMemory::kBalanced, true, 1000),
      IsEmpty());
}

TEST(ChooseTest, BalancedAndFastestAreNeverSlowerThanDenseByTheirOwnNumbers) {
  std::mt19937 random(11);
  std::uniform_real_distribution<double> micros(1, 100);
  for (int round = 0; round < 2000; ++round) {
    std::vector<FakeOption> options;
    for (const auto* variant : {&kDense, &kCsr, &kCsrWide, &kDiagonal, &kBlocks}) {
      options.push_back(
          {variant, 200 + random() % 800, {micros(random), micros(random), micros(random)}});
    }
    options[0].bytes = 1000;
    const CostTable table = FakeTable(options);
    for (const WeightMemory mode : {WeightMemory::kBalanced, WeightMemory::kFastest}) {
      const std::vector<int> choice = ChooseOptions(table, mode, false, 1000);
      ASSERT_EQ(choice.size(), 3u);
      for (size_t b = 0; b < choice.size(); ++b) {
        ASSERT_LE(table.costs[b][choice[b]].micros, table.DenseMicros(b)) << "round " << round;
      }
      if (mode == WeightMemory::kFastest) continue;
      size_t bytes = 0;
      for (size_t i = 0; i < table.options.size(); ++i) {
        if (std::count(choice.begin(), choice.end(), static_cast<int>(i)) > 0)
          bytes += table.options[i].resident_bytes;
      }
      ASSERT_LE(bytes, 1000u);
    }
  }
}

}  // namespace
}  // namespace espalier::planner
