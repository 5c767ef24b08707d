// Weights changed in place, for every CPU variant: what is in memory afterwards is what encoding the new weight gives.
#include "engine/planner/resident_weight.h"

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/block_csr_linear/block_csr_linear.h"
#include "tests/engine/planner/mlp_builder.h"
#include "tests/engine/planner/weight_changes.h"

namespace espalier::planner {
namespace {

MemoryPatcher& OnHost() {
  static MemoryPatcher patcher(nullptr);
  return patcher;
}

using namespace espalier::testing;  // NOLINT(google-build-using-namespace)
using kernels::Layout;
using kernels::LinearVariant;
using sparse::ElementEdit;
using Zeros = ResidentWeight::Zeros;
using ::testing::HasSubstr;

std::vector<ElementEdit> Differences(const Tensor& before, const Tensor& after) {
  std::vector<ElementEdit> edits;
  for (int64_t i = 0; i < before.elements(); ++i) {
    if (BitsAt(before, i) != BitsAt(after, i))
      edits.push_back({i, BitsAt(before, i), BitsAt(after, i)});
  }
  return edits;
}

Tensor CopyOf(const Tensor& tensor) { return *Convert(tensor.view(), tensor.dtype()); }

class ResidentWeightTest : public ::testing::TestWithParam<const LinearVariant*> {
 protected:
  DType dtype() const {
    const std::string name = variant_.name;
    return name.find("bf16") != std::string::npos   ? DType::kBFloat16
           : name.find("_f16") != std::string::npos ? DType::kFloat16
                                                    : DType::kFloat32;
  }
  std::vector<sparse::LayoutSpec> Specs() const {
    std::vector<sparse::LayoutSpec> specs;
    for (const auto& [rows, cols] : {std::pair{1, 1}, {4, 4}, {16, 16}, {4, 12}, {40, 8}}) {
      const sparse::LayoutSpec spec = {variant_.layout, rows, cols};
      const bool blocks =
          variant_.layout == Layout::kBlockCsr || variant_.layout == Layout::kDiagonal;
      kernels::LinearDesc desc = {1,    96,   96, variant_.layout, dtype(), DType::kFloat32,
                                  rows, cols, 5};
      if ((rows == 1 || blocks) && variant_.supports(desc)) specs.push_back(spec);
    }
    return specs;
  }
  std::unique_ptr<ResidentWeight> Make(const Tensor& dense, const sparse::LayoutSpec& spec) const {
    auto made = ResidentWeight::Create(dense.view(), spec, variant_);
    EXPECT_TRUE(made.ok()) << made.status();
    return *std::move(made);
  }
  // Everything that a kernel reads.
  std::string Bytes(const ResidentWeight& weight) const {
    const kernels::WeightView w = weight.view();
    std::string bytes;
    const auto add = [&](const void* from, size_t size) {
      if (from != nullptr) bytes.append(static_cast<const char*>(from), size);
    };
    add(w.row_ptr, (w.block_row_count() + 1) * 4);
    add(w.col_idx, w.count * 4);
    add(w.col_idx16, w.count * 2);
    add(w.offsets, w.count * 4);
    add(variant_.packing != nullptr ? w.packed : w.values, weight.bytes() - bytes.size());
    return bytes;
  }

  const LinearVariant& variant_ = *GetParam();
  std::mt19937 random_{11};
};

TEST_P(ResidentWeightTest, EditsThatFitLeaveTheBytesOfAFreshEncoding) {
  constexpr Pattern kPatterns[] = {Pattern::kDense, Pattern::kDiagonal, Pattern::kBlocks,
                                   Pattern::kScattered, Pattern::kZero};
  constexpr int64_t kShapes[][2] = {{70, 130}, {130, 70}, {96, 96}, {1, 5}};
  int in_place = 0, anew = 0;
  for (const sparse::LayoutSpec& spec : Specs()) {
    for (const Pattern pattern : kPatterns) {
      for (const auto& [out, in] : kShapes) {
        for (const Change change :
             {Change::kValue, Change::kSign, Change::kDrop, Change::kGrow, Change::kOdd}) {
          const Tensor before = PatternWeight(pattern, out, in, 0.2, 3, dtype());
          Tensor after = CopyOf(before);
          Apply(change, 0.02, after, random_);
          const auto edits = Differences(before, after);
          auto edited = Make(before, spec);
          const auto fresh = Make(after, spec);
          const std::string old_bytes = Bytes(*edited);
          auto fits = edited->EditInPlace(edits, Zeros::kMayStay, OnHost());
          ASSERT_TRUE(fits.ok()) << fits.status();
          const std::string where = absl::StrCat(sparse::ToString(spec), " ", out, "x", in,
                                                 " change ", static_cast<int>(change));
          if (!*fits) {
            EXPECT_EQ(change, Change::kGrow) << where;
            EXPECT_EQ(Bytes(*edited), old_bytes) << where << ": nothing is changed";
            ASSERT_TRUE(edited->Rebuild(after.view()).ok());
            ++anew;
          } else if (edited->view().count == fresh->view().count) {
            ++in_place;
          } else {
            continue;  // zeros that a fresh encoding leaves out
          }
          EXPECT_EQ(Bytes(*edited), Bytes(*fresh)) << where;
        }
      }
    }
  }
  if (Specs().empty()) GTEST_SKIP() << "this machine has no kernel for it";
  EXPECT_GT(in_place, 20);
  EXPECT_EQ(anew == 0, variant_.layout == Layout::kDense) << "a dense weight has room for all";
}

TEST_P(ResidentWeightTest, AsEncodedTakesOnlyWhatKeepsTheNonZerosWhereTheyAre) {
  for (const sparse::LayoutSpec& spec : Specs()) {
    const Tensor before = PatternWeight(Pattern::kScattered, 60, 50, 0.3, 3, dtype());
    for (const Change change : {Change::kValue, Change::kDrop, Change::kGrow, Change::kSign}) {
      Tensor after = CopyOf(before);
      Apply(change, 0.1, after, random_);
      auto edited = Make(before, spec);
      auto fits = edited->EditInPlace(Differences(before, after), Zeros::kAsEncoded, OnHost());
      ASSERT_TRUE(fits.ok()) << fits.status();
      EXPECT_EQ(*fits, change == Change::kValue || change == Change::kSign);
      EXPECT_EQ(Bytes(*edited), Bytes(*Make(*fits ? after : before, spec)));
    }
  }
}

TEST_P(ResidentWeightTest, AnElementThatIsNotWhatItWasIsNamedAndNothingChanges) {
  for (const sparse::LayoutSpec& spec : Specs()) {
    const Tensor before = PatternWeight(Pattern::kDiagonal, 60, 50, 0.3, 3, dtype());
    Tensor after = CopyOf(before);
    Apply(Change::kValue, 0.2, after, random_);
    auto edits = Differences(before, after);
    edits[edits.size() / 2].old_bits ^= 1;
    const int64_t position = edits[edits.size() / 2].position;
    auto edited = Make(before, spec);
    const auto fits = edited->EditInPlace(edits, Zeros::kMayStay, OnHost());
    EXPECT_EQ(fits.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(fits.status().message(),
                HasSubstr(absl::StrCat("row ", position / 50, ", column ", position % 50)));
    EXPECT_EQ(Bytes(*edited), Bytes(*Make(before, spec)));
    // Where nothing is stored, non-zero old bits are as wrong.
    const ElementEdit absent = {1, BitsAt(before, 0) | 1, 5};
    auto zero = Make(PatternWeight(Pattern::kZero, 60, 50, 0, 3, dtype()), spec);
    EXPECT_EQ(zero->EditInPlace({&absent, 1}, Zeros::kMayStay, OnHost()).status().code(),
              absl::StatusCode::kFailedPrecondition);
  }
}

TEST_P(ResidentWeightTest, ADroppedElementGrowsBackWhereItWas) {
  for (const sparse::LayoutSpec& spec : Specs()) {
    const Tensor before = PatternWeight(Pattern::kScattered, 60, 50, 0.3, 3, dtype());
    Tensor dropped = CopyOf(before);
    Apply(Change::kDrop, 0.3, dropped, random_);
    auto edited = Make(before, spec);
    ASSERT_TRUE(*edited->EditInPlace(Differences(before, dropped), Zeros::kMayStay, OnHost()));
    ASSERT_TRUE(*edited->EditInPlace(Differences(dropped, before), Zeros::kMayStay, OnHost()));
    EXPECT_EQ(Bytes(*edited), Bytes(*Make(before, spec)));
  }
}

TEST_P(ResidentWeightTest, HoldsNoColumnsThatThePackedFormHas) {
  if (variant_.packing == nullptr) GTEST_SKIP() << "nothing is packed";
  for (const sparse::LayoutSpec& spec : Specs()) {
    const Tensor dense = PatternWeight(Pattern::kBlocks, 96, 130, 0.2, 3, dtype());
    const auto plain = sparse::SparseWeight::FromDense(dense.view(), spec);
    const kernels::WeightView view = plain->view();
    size_t bytes = variant_.packed_bytes(view);
    if (view.offsets != nullptr) bytes += view.count * sizeof(int32_t);
    if (view.row_ptr != nullptr) bytes += (view.block_row_count() + 1) * sizeof(int32_t);
    const bool columns =
        view.col_idx16 != nullptr && !kernels::BlockCsrLinearCpu::PacksColumns(view);
    if (columns) bytes += view.count * sizeof(uint16_t);
    const auto weight = Make(dense, spec);
    EXPECT_EQ(weight->bytes(), bytes);
    EXPECT_EQ(weight->view().col_idx16 != nullptr, columns);
  }
}

std::vector<const LinearVariant*> CpuVariants() {
  std::vector<const LinearVariant*> all;
  for (const LinearVariant& variant : kernels::LinearVariants()) all.push_back(&variant);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Variants, ResidentWeightTest, ::testing::ValuesIn(CpuVariants()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace espalier::planner
