#include "engine/sparse/pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "engine/sparse/structure.h"

namespace espalier::sparse {
namespace {

using ::testing::HasSubstr;

Tensor FromValues(int64_t out, int64_t in, const std::vector<float>& values) {
  Tensor tensor = *Tensor::Allocate(DType::kFloat32, {out, in});
  std::copy(values.begin(), values.end(), tensor.As<float>());
  return tensor;
}

std::vector<float> Pruned(const Tensor& weight, const char* pattern, double sparsity) {
  const Tensor pruned = *Prune(weight.view(), *ParsePattern(pattern), sparsity);
  return {pruned.As<float>(), pruned.As<float>() + pruned.elements()};
}

WeightStructure StructureOf(const char* pattern, double sparsity, int64_t out, int64_t in,
                            DType dtype = DType::kFloat32) {
  const Tensor weight = *RandomWeight(dtype, out, in, 7);
  return *AnalyzeStructure(Prune(weight.view(), *ParsePattern(pattern), sparsity)->view());
}

TEST(PatternTest, NamesAreReadAsTheyArePrinted) {
  for (const char* text : {"unstructured", "diagonal", "diagonal(16)", "block(32)", "2:4"})
    EXPECT_EQ(ToString(*ParsePattern(text)), text);
  EXPECT_EQ(ToString(*ParsePattern("diagonal(1)")), "diagonal");
}

TEST(PatternTest, AnythingElseIsRefusedWithWhatIsUnderstood) {
  for (const char* text :
       {"", "2:8", "block", "block(1)", "block(0)", "block(-4)", "block(04)", "block( 4)",
        "block(4", "diagonal(4097)", "diagonal(16x32)", "block(99999999999999999999)"}) {
    const auto pattern = ParsePattern(text);
    ASSERT_FALSE(pattern.ok()) << text;
    EXPECT_THAT(std::string(pattern.status().message()), HasSubstr("2:4, with B up to 4096"));
  }
}

TEST(PruneTest, TheLargestMagnitudesStay) {
  const Tensor weight = FromValues(2, 4, {1, -8, 2, 3, 7, -4, 5, 6});
  EXPECT_EQ(Pruned(weight, "unstructured", 0.5), (std::vector<float>{0, -8, 0, 0, 7, 0, 5, 6}));
  EXPECT_EQ(Pruned(weight, "2:4", 0.9), (std::vector<float>{0, -8, 0, 3, 7, 0, 0, 6}));
}

TEST(PruneTest, BlocksAndDiagonalsStayOrGoWhole) {
  const Tensor weight = FromValues(4, 4,
                                   {1, 1, 9, 0,  //
                                    1, 1, 0, 1,  //
                                    3, 3, 2, 2,  //
                                    3, 3, 2, 2});
  EXPECT_EQ(Pruned(weight, "block(2)", 0.5),
            (std::vector<float>{0, 0, 9, 0, 0, 0, 0, 1, 3, 3, 0, 0, 3, 3, 0, 0}));
  // Offset 2 (row − column modulo 4) holds 9, 1, 3 and 3.
  EXPECT_EQ(Pruned(weight, "diagonal", 0.75),
            (std::vector<float>{0, 0, 9, 0, 0, 0, 0, 1, 3, 0, 0, 0, 0, 3, 0, 0}));
}

TEST(PruneTest, WhatIsPrunedIsFoundAgain) {
  for (const auto& [out, in] : {std::pair<int64_t, int64_t>{256, 256}, {128, 320}, {320, 128}}) {
    EXPECT_EQ(StructureOf("diagonal", 0.9, out, in).found, "diagonal(1)");
    EXPECT_EQ(StructureOf("diagonal(16)", 0.75, out, in).found, "diagonal(16)");
    EXPECT_EQ(StructureOf("block(32)", 0.9, out, in).found, "block_csr(32)");
    EXPECT_EQ(StructureOf("2:4", 0.5, out, in).found, "2:4");
    EXPECT_EQ(StructureOf("unstructured", 0.9, out, in).found, "scattered");
  }
}

TEST(PruneTest, ZerosAreAsManyAsAskedInEveryType) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const double sparsity : {0.5, 0.9, 0.99})
      EXPECT_NEAR(StructureOf("unstructured", sparsity, 100, 101, dtype).sparsity(), sparsity,
                  1e-4);
  }
}

TEST(PruneTest, EqualMagnitudesGoEverywhereNotFromTheEnd) {
  const Tensor weight = FromValues(64, 64, std::vector<float>(64 * 64, 1.0f));
  const std::vector<float> pruned = Pruned(weight, "unstructured", 0.5);
  int first_half = 0;
  for (size_t i = 0; i < pruned.size() / 2; ++i) first_half += pruned[i] != 0;
  EXPECT_NEAR(first_half, 1024, 150);
}

TEST(PruneTest, SomethingAlwaysStays) {
  const Tensor weight = FromValues(3, 3, {1, 2, 3, 4, 5, 6, 7, 8, 9});
  EXPECT_EQ(Pruned(weight, "unstructured", 0.999), (std::vector<float>{0, 0, 0, 0, 0, 0, 0, 0, 9}));
  EXPECT_EQ(Pruned(weight, "block(16)", 0.9), (std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST(PruneTest, NotANumberIsNotPrunedAway) {
  const Tensor weight = FromValues(1, 4, {1, NAN, 2, 3});
  const std::vector<float> pruned = Pruned(weight, "unstructured", 0.75);
  EXPECT_TRUE(std::isnan(pruned[1]));
}

TEST(PruneTest, OtherTypesAndRanksAreRefused) {
  const Tensor integers = *Tensor::Allocate(DType::kInt32, {4, 4});
  EXPECT_TRUE(absl::IsInvalidArgument(Prune(integers.view(), Pattern{}, 0.5).status()));
  const Tensor vector = *Tensor::Allocate(DType::kFloat32, {4});
  EXPECT_TRUE(absl::IsInvalidArgument(Prune(vector.view(), Pattern{}, 0.5).status()));
}

TEST(RandomWeightTest, IsTheSameAgainAndHasNoZero) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const Tensor a = *RandomWeight(dtype, 100, 100, 3), b = *RandomWeight(dtype, 100, 100, 3);
    EXPECT_EQ(std::memcmp(a.data(), b.data(), a.bytes()), 0);
    EXPECT_EQ(AnalyzeStructure(a.view())->nonzeros, 10000);
    EXPECT_EQ(AnalyzeStructure(a.view())->subnormals, 0);
  }
}

}  // namespace
}  // namespace espalier::sparse
