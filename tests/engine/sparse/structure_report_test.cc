#include "engine/sparse/structure_report.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/sparse/weight_patterns.h"

namespace espalier::sparse {
namespace {

using testing::HasSubstr;
using testing::Not;

NamedStructure Named(std::string name, const Tensor& weight) {
  return {std::move(name), *AnalyzeStructure(weight.view())};
}

TEST(StructureReportTest, TheTableOfAKnownModelReadsLikeThis) {
  Random random(1);
  const std::vector<NamedStructure> tensors = {
      Named("fc1.weight", DiagonalWeight(random, 64, 96, 1, {3, 50, 51})),
      Named("classifier.weight", MakeWeight(random, 10, 64, [](int64_t, int64_t) { return true; })),
  };
  EXPECT_EQ(
      StructureTable(tensors),
      R"(TENSOR             SHAPE     DTYPE  SPARSITY  STRUCTURE    DIAGONALS            DEAD ROWS/COLS  -0.0  SUBNORMALS  AT MOST N:M
fc1.weight         [64, 96]  FP32   96.9 %    diagonal(1)  3/96, 100.0 % full   0/0             0     0           2:16
    *diagonal(1) 780 B   csr 1.8 KiB   diagonal(4) 4.0 KiB (18.8 % full)
    block_csr(4) 4.2 KiB (18.8 % full)   block_csr(8) 8.1 KiB (9.4 % full)   dense 24.0 KiB
    offsets: 2 runs, longest 2; col - row from -46 to 51
classifier.weight  [10, 64]  FP32   0.0 %     dense        64/64, 100.0 % full  0/0             0     0           -
    *dense 2.5 KiB   csr 5.0 KiB
total: dense 26.5 KiB, smallest layouts 3.3 KiB
)");
}

TEST(StructureReportTest, BytesAreInHumanUnits) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1024), "1.0 KiB");
  EXPECT_EQ(HumanBytes(1536), "1.5 KiB");
  EXPECT_EQ(HumanBytes((1 << 20) - 1), "1.0 MiB");
  EXPECT_EQ(HumanBytes(size_t{64} << 20), "64.0 MiB");
  EXPECT_EQ(HumanBytes(size_t{5000} << 40), "5000.0 TiB");
}

TEST(StructureReportTest, NothingThatIsNotWholeLooksWhole) {
  Random random(2);
  Tensor nearly = ScatteredWeight(random, 200, 200, 0);
  SetBits(nearly, 7, 7, 0x3f800000);
  EXPECT_THAT(StructureTable(std::vector{Named("w", nearly)}), HasSubstr(">99.9 %"));
  Tensor barely = ScatteredWeight(random, 200, 200, 1);
  SetBits(barely, 7, 7, 0);
  EXPECT_THAT(StructureTable(std::vector{Named("w", barely)}), HasSubstr("<0.1 %"));
}

TEST(StructureReportTest, SubnormalAndNonfiniteValuesAreExplained) {
  Random random(3);
  Tensor weight = ScatteredWeight(random, 8, 8, 1);
  EXPECT_THAT(StructureTable(std::vector{Named("w", weight)}), Not(HasSubstr("subnormal:")));
  SetBits(weight, 0, 0, 1);
  SetBits(weight, 0, 1, 0x7f800000);
  const std::string table = StructureTable(std::vector{Named("w", weight)});
  EXPECT_THAT(table, HasSubstr("1 values are subnormal"));
  EXPECT_THAT(table, HasSubstr("flush_subnormals"));
  EXPECT_THAT(table, HasSubstr("warning: 1 values are infinite or NaN"));
}

TEST(StructureReportTest, OnlyTheBestFewOfAKindAreListedInTheTable) {
  Random random(4);
  const NamedStructure tensor = Named("w", BlockWeight(random, 512, 512, 16, 16, 0.05));
  const std::string table = StructureTable({tensor});
  size_t listed = 0;
  for (size_t at = 0; (at = table.find("block_csr(", at)) != std::string::npos; ++at) ++listed;
  EXPECT_EQ(listed, size_t{kReportedPerLayout} + 1);  // and once as the structure found
  EXPECT_THAT(table, HasSubstr("\n    *block_csr(16) "));
  for (const LayoutOption& option : tensor.structure.layouts) {
    EXPECT_THAT(StructureJson({tensor}), HasSubstr("\"" + ToString(option.spec) + "\""));
  }
}

TEST(StructureReportTest, AHostileNameCanNeitherDriveTheTerminalNorBreakTheJson) {
  Random random(5);
  const Tensor weight = ScatteredWeight(random, 4, 4, 1);
  const std::string name = "a\x1b[2J\"\\\n\xc3\xa9\xff\xc0\xaf\xed\xa0\x80\xf4\x90\x80\x80\xe2\x82";
  const std::string table = StructureTable(std::vector{Named(name, weight)});
  for (const char c : table) EXPECT_TRUE(c == '\n' || (c >= 0x20 && c < 0x7f)) << int(c);
  // é stays; every byte that is part of no UTF-8 sequence becomes one replacement character.
  EXPECT_THAT(StructureJson(std::vector{Named(name, weight)}),
              HasSubstr("\"name\": \"a\\u001b[2J\\\"\\\\\\u000a\xc3\xa9\\ufffd\\ufffd\\ufffd\\ufffd"
                        "\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\", "));
}

TEST(StructureReportTest, JsonHoldsEveryNumber) {
  Random random(6);
  const NamedStructure tensor = Named("w", DiagonalWeight(random, 4, 4, 1, {1}));
  EXPECT_THAT(
      StructureJson({tensor}),
      testing::StartsWith(
          "{\"tensors\": [\n  {\"name\": \"w\", \"out\": 4, \"in\": 4, \"dtype\": \"FP32\", "
          "\"sparsity\": 0.75, \"found\": \"diagonal(1)\", \"nonzeros\": 4, \"negative_zeros\": 0, "
          "\"subnormals\": 0, \"nonfinite\": 0, \"dead_rows\": 0, \"dead_cols\": 0, "
          "\"diagonals\": 1, \"diagonal_fill\": 1, \"diagonal_runs\": 1, \"longest_run\": 1, "
          "\"aligned_run\": 1, \"bandwidth_lower\": 1, \"bandwidth_upper\": 3, "
          "\"two_of_four\": true, \"n_of_m\": [1, 4], \"layouts\": [{\"layout\": \"diagonal(1)\", "
          "\"count\": 1, \"stored\": 4, \"bytes\": 20, \"fill\": 1}, "));
  EXPECT_THAT(StructureJson({tensor}), HasSubstr("],\n\"dense_bytes\": 64, \"best_bytes\": 20}\n"));
}

TEST(StructureReportTest, NoWeightsIsSaidPlainly) {
  EXPECT_EQ(StructureTable({}), "no weights\n");
  EXPECT_EQ(StructureJson({}), "{\"tensors\": [\n  ],\n\"dense_bytes\": 0, \"best_bytes\": 0}\n");
}

}  // namespace
}  // namespace espalier::sparse
