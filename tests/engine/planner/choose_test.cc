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

TEST(ChooseTest, BalancedTakesOneLayoutThatNoBucketRulesOut) {
  const CostTable table = FakeTable({{&kDense, 1000, {100, 200, 300}},
                                     {&kCsr, 600, {10, 20, 320}},
                                     {&kDiagonal, 600, {90, 150, 290}}});
  EXPECT_THAT(ChooseOptions(table, WeightMemory::kBalanced, false, 1000), ElementsAre(2, 2, 2));
}

TEST(ChooseTest, BalancedFallsBackToDense) {
  const CostTable table =
      FakeTable({{&kDense, 1000, {100, 200, 300}}, {&kCsr, 600, {10, 20, 320}}});
  EXPECT_THAT(ChooseOptions(table, WeightMemory::kBalanced, false, 1000), ElementsAre(0, 0, 0));
}

TEST(ChooseTest, ThreeMicrosecondsOrFivePercentMoreThanDenseRulesNothingOut) {
  EXPECT_EQ(TolerableMicros(2, 3), 5);
  EXPECT_EQ(TolerableMicros(200, 3), 210);
  EXPECT_EQ(TolerableMicros(kCannotRun, 3), kCannotRun);
  const auto choice = [](double first, double last) {
    const CostTable table =
        FakeTable({{&kDense, 1000, {9.33, 20, 300}}, {&kCsr, 600, {first, 5, last}}});
    return ChooseOptions(table, WeightMemory::kBalanced, false, 1000)[0];
  };
  EXPECT_EQ(choice(12.3, 100), 1);
  EXPECT_EQ(choice(12.4, 100), 0);
  EXPECT_EQ(choice(9, 314), 1);
  EXPECT_EQ(choice(9, 316), 0);
}

TEST(ChooseTest, WhatIsTolerableEverywhereButSlowerOnAverageIsNotTaken) {
  const CostTable table = FakeTable({{&kDense, 1000, {2, 3, 4}}, {&kCsr, 600, {2.9, 3.9, 3.9}}});
  EXPECT_THAT(ChooseOptions(table, WeightMemory::kBalanced, false, 1000), ElementsAre(0, 0, 0));
}

TEST(ChooseTest, OfTheLayoutsThatQualifyTheFastestOnAverageIsTaken) {
  const CostTable table = FakeTable(
      {{&kDense, 1000, {10, 20, 30}}, {&kCsr, 900, {10.5, 2, 3}}, {&kDiagonal, 100, {9, 9, 9}}});
  EXPECT_THAT(ChooseOptions(table, WeightMemory::kBalanced, false, 900), ElementsAre(1, 1, 1));
}

TEST(ChooseTest, AWeightOfZerosTakesTheFastestEmptyLayoutInEveryMode) {
  CostTable table =
      FakeTable({{&kDense, 1000, {1, 1, 1}}, {&kCsr, 40, {4, 5, 21}}, {&kBlocks, 72, {3, 6, 20}}});
  table.options[1].layout.stored = table.options[2].layout.stored = 0;  // offsets of rows remain
  for (const WeightMemory mode :
       {WeightMemory::kSmallest, WeightMemory::kBalanced, WeightMemory::kFastest}) {
    for (const bool deterministic : {false, true}) {
      EXPECT_THAT(ChooseOptions(table, mode, deterministic, 1000), ElementsAre(2, 2, 2));
    }
  }
}

TEST(ChooseTest, AWeightOfZerosTakesWhatRunsWhereNoKernelTakesAnEmptyLayout) {
  CostTable table = FakeTable({{&kDense, 1000, {1, 2}}, {&kCsr, 40, {kCannotRun, kCannotRun}}});
  table.options[1].layout.stored = 0;
  EXPECT_THAT(ChooseOptions(table, WeightMemory::kBalanced, false, 1000), ElementsAre(0, 0));
}

TEST(ChooseTest, ACloseCallIsALayoutFasterOnAverageThatLosesSomewhereByLittle) {
  const CostTable table = FakeTable({
      {&kDense, 1000, {100, 100, 100}},
      {&kCsr, 600, {120, 50, 104}},      // 120 > 105, close; 104 is tolerable
      {&kDiagonal, 600, {140, 10, 10}},  // not close
      {&kBlocks, 600, {120, 100, 100}},  // slower on average
      {&kCsrWide, 600, {105, 100, 10}},  // qualifies
  });
  const std::vector<CloseCall> calls = CloseCalls(table);
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0].bucket, 0u);
  EXPECT_EQ(calls[0].option, 1);
}

TEST(ChooseTest, ACostThatWasNeverMeasuredIsNotMeasuredAgain) {
  CostTable table = FakeTable({{&kDense, 1000, {100, 100}}, {&kCsr, 600, {120, 50}}});
  table.costs[0][1].measured = 0;
  EXPECT_THAT(CloseCalls(table), IsEmpty());
}

TEST(ChooseTest, WhyNotNamesTheBatchThatRulesALayoutOut) {
  const CostTable table = FakeTable({{&kDense, 1000, {10, 20, 30}},
                                     {&kCsr, 600, {15, 2, 3}},
                                     {&kDiagonal, 600, {9, 19, 2}},
                                     {&kBlocks, 500, {1, kCannotRun, 1}}});
  const auto why = [&](WeightMemory mode, bool deterministic, int chosen, int other) {
    return WhyNot(table, mode, deterministic, {1, 2, 4}, chosen, other);
  };
  EXPECT_EQ(why(WeightMemory::kBalanced, false, 0, 1),
            "csr is 15 us, dense 10 us at batch 1; weight_memory=fastest keeps both");
  EXPECT_EQ(why(WeightMemory::kBalanced, false, 1, 2),
            "diagonal(1) is slower on average over the batches; weight_memory=fastest keeps both");
  EXPECT_EQ(why(WeightMemory::kBalanced, false, 0, 3), "block_csr(1) does not run at every batch");
  EXPECT_EQ(why(WeightMemory::kSmallest, false, 3, 1),
            "csr takes more memory; weight_memory=balanced may choose it");
  EXPECT_EQ(why(WeightMemory::kBalanced, true, 0, 1),
            "deterministic: one batch-invariant kernel for all batches");
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
  // The dense kernel that is not batch-invariant rules all out, which leaves the
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

TEST(ChooseTest, FastestIsNeverSlowerThanDenseByItsOwnNumbersAndBalancedNeverIntolerably) {
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
        const double dense = table.DenseMicros(b);
        ASSERT_LE(table.costs[b][choice[b]].micros,
                  mode == WeightMemory::kFastest ? dense : TolerableMicros(dense, 3))
            << "round " << round;
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
