// espalier advise: the rules of its advice, and its command line end to end on small layers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "clients/cli/advice.h"
#include "tests/clients/run_line.h"

namespace espalier::cli {
namespace {

using sparse::ParsePattern;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

AdvicePoint Point(const char* pattern, double sparsity, std::vector<double> gains) {
  AdvicePoint point;
  point.pattern = *ParsePattern(pattern);
  point.asked = point.zeros = sparsity;
  point.weight_bytes = 100 * (1 - sparsity);
  point.dense_bytes = 100;
  int64_t batch = 1;
  for (const double gain : gains) {
    AdviceBatch one;
    one.batch = batch;
    one.dense_micros = 100 * gain;
    one.chosen.micros = 100;
    one.chosen.measured = true;
    point.batches.push_back(one);
    batch *= 16;
  }
  return point;
}

TEST(AdviceTest, TheLeastSparsityThatBringsTheGainIsRecommendedWithItsFastestPattern) {
  const std::vector<AdvicePoint> points = {
      Point("unstructured", 0.8, {1.0}), Point("unstructured", 0.9, {2.1}),
      Point("diagonal", 0.8, {1.9}),     Point("diagonal", 0.9, {5.0}),
      Point("block(32)", 0.9, {4.0}),    Point("diagonal", 0.99, {30.0})};
  EXPECT_EQ(Recommend(points, 2), 3);
  EXPECT_EQ(Recommend(points, 1.5), 2);
  EXPECT_EQ(Recommend(points, 6), 5);
}

TEST(AdviceTest, WithWeightsWhatKeepsTheMostOfThemIsRecommended) {
  std::vector<AdvicePoint> points = {Point("block(32)", 0.8, {9.0}),
                                     Point("unstructured", 0.9, {2.1}),
                                     Point("unstructured", 0.8, {1.5})};
  points[0].kept = 0.3;
  points[1].kept = 0.6;
  points[2].kept = 0.75;
  EXPECT_EQ(Recommend(points, 2), 1);
  EXPECT_EQ(Recommend(points, 3), 0);
}

TEST(AdviceTest, WhenNothingBringsTheGainTheFastestIsNamedAndSaidToFallShort) {
  Advice advice;
  advice.source = "measured";
  advice.wanted = 8;
  advice.layers = {{4, 4, 1, {Point("diagonal", 0.8, {1.5}), Point("diagonal", 0.9, {3.0})}}};
  EXPECT_EQ(Recommend(advice.layers[0].points, 8), 1);
  EXPECT_THAT(AdviceTable(advice), AllOf(HasSubstr("Prune to diagonal with 90 % zeros: 3.00x"),
                                         HasSubstr("Nothing tried reaches the 8x")));
}

TEST(AdviceTest, WhatDoesNotPayIsNotRecommended) {
  Advice advice;
  advice.source = "measured";
  advice.layers = {
      {4, 4, 1, {Point("unstructured", 0.5, {1.0, 1.0}), Point("2:4", 0.5, {1.05, 1.1})}}};
  EXPECT_EQ(Recommend(advice.layers[0].points, 2), -1);
  EXPECT_THAT(AdviceTable(advice), HasSubstr("Do not prune for speed"));
  EXPECT_THAT(AdviceJson(advice), HasSubstr("\"prune\": false"));
}

TEST(AdviceTest, GainsOfBatchesAreAveragedGeometrically) {
  EXPECT_NEAR(Point("diagonal", 0.9, {1, 16}).Gain(), 4, 1e-12);
}

TEST(AdviceTest, LayersTogetherAreTheirTimesAndBytesAdded) {
  AdviceLayer small = {2, 2, 3, {Point("diagonal", 0.5, {4})}};
  AdviceLayer large = {4, 4, 1, {Point("diagonal", 0.9, {1})}};
  large.points[0].batches[0].dense_micros = large.points[0].batches[0].chosen.micros = 700;
  const std::vector<AdvicePoint> together = Together({small, large});
  ASSERT_EQ(together.size(), 1u);
  EXPECT_NEAR(together[0].Gain(), (3 * 400 + 700) / (3 * 100 + 700.0), 1e-12);
  EXPECT_NEAR(together[0].weight_bytes, 3 * 50 + 10, 1e-9);
  EXPECT_NEAR(together[0].zeros, (3 * 4 * 0.5 + 16 * 0.9) / 28, 1e-12);
}

TEST(AdviceTest, ThePatternsSayFromWhichSparsityTheyPay) {
  Advice advice;
  advice.source = "measured";
  advice.layers = {{4,
                    4,
                    1,
                    {Point("diagonal", 0.8, {1.5}), Point("diagonal", 0.9, {3.0}),
                     Point("unstructured", 0.9, {1.0})}}};
  EXPECT_THAT(AdviceTable(advice), HasSubstr("diagonal from 80 %, unstructured nowhere here."));
}

TEST(AdviseCommandTest, MeasuresHereAndSaysWhatToPruneTo) {
  const Outcome outcome = RunLine({"advise", "--shape", "256x128", "--batch", "4,1,4", "--sparsity",
                                   "50,95", "--pattern", "diagonal(16),2:4", "--threads", "1"});
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("measured on cpu"), HasSubstr("256 x 128: speed over dense"),
                    HasSubstr("batch 1  batch 4"), HasSubstr("random weights, commit"),
                    HasSubstr("rune ")));
  EXPECT_THAT(outcome.err, HasSubstr("[3/3] 256 x 128, 2:4, 50.00 % zeros"));
}

TEST(AdviseCommandTest, AModelsOwnWeightsArePrunedAndWhatIsKeptIsShown) {
  const Outcome outcome =
      RunLine({"advise", "--model", "tests/data/models/mnist_dense", "--batch", "1", "--sparsity",
               "90", "--pattern", "unstructured,diagonal", "--threads", "1"});
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("weights of tests/data/models/mnist_dense"), HasSubstr("kept"),
                    HasSubstr("all layers, their times and bytes added")));
}

TEST(AdviseCommandTest, JsonHoldsEveryPointAndTheAdvice) {
  const Outcome outcome = RunLine({"advise", "--shape", "64", "--batch", "1", "--sparsity", "90",
                                   "--pattern", "diagonal", "--threads", "1", "--json"});
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("\"source\": \"measured\""), HasSubstr("\"dense_us\""),
                    HasSubstr("\"advice\": {"), HasSubstr("\"pattern\": \"diagonal\"")));
}

TEST(AdviseCommandTest, PredictsForANamedDeviceAndSaysFromWhat) {
  const Outcome outcome =
      RunLine({"advise", "--shape", "4096", "--precision", "bf16", "--batch", "64,1024",
               "--pattern", "diagonal(64),unstructured", "--for", "h200"});
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("predicted for NVIDIA H200"),
                                 ContainsRegex("linear.json .commit [0-9a-f]{7}, 20"),
                                 HasSubstr("right within a factor of"), Not(HasSubstr("?"))));
}

TEST(AdviseCommandTest, APredictionFarFromWhatWasMeasuredIsSaidToBe) {
  const Outcome outcome = RunLine({"advise", "--shape", "64", "--precision", "bf16", "--batch", "1",
                                   "--pattern", "diagonal(64)", "--for", "h200"});
  EXPECT_THAT(outcome.out, HasSubstr("far from anything measured: the nearest is diagonal(64), "));
}

TEST(AdviseCommandTest, WrongRequestsSayWhatWouldDo) {
  const auto refused = [](std::vector<std::string> flags, const char* text) {
    flags.insert(flags.begin(), "advise");
    const Outcome outcome = RunLine(flags);
    EXPECT_NE(outcome.code, kExitOk);
    EXPECT_THAT(outcome.err, HasSubstr(text));
  };
  refused({}, "--shape OUTxIN (repeat it for several) or --model FILE");
  refused({"--shape", "4096x", "--batch", "1"}, "as in 4096x1024");
  refused({"--shape", "0x4"}, "as in 4096x1024");
  refused({"--shape", "65536"}, "expected at most 268435456");
  refused({"--shape", "8", "--sparsity", "0.9"}, "percentages of zeros");
  refused({"--shape", "8", "--sparsity", "100"}, "percentages of zeros");
  refused({"--shape", "8", "--pattern", "rows"}, "expected unstructured, diagonal");
  refused({"--shape", "8", "--precision", "int8"}, "f32, bf16 or f16");
  refused({"--shape", "8", "--batch", "0"}, "--batch");
  refused({"--shape", "32768x8192", "--batch", "65536"}, "give a smaller --batch");
  refused({"--shape", "8", "--weight_memory", "tiny"}, "smallest");
  refused({"--shape", "8", "--device", "gpu"}, "expected cpu or cuda");
  refused({"--shape", "8", "--for", "abacus"}, "h200; for other devices run advise there");
  refused({"--shape", "8", "--for", "h200", "--threads", "1"}, "--for predicts");
  refused({"--shape", "8", "--for", "h200", "--pattern", "block(48)"}, "nothing like block(48)");
  refused({"--model", "no/such/model"}, "does not exist");
}

}  // namespace
}  // namespace espalier::cli
