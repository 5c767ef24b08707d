// Where a packing says that elements lie, for every variant of the CPU and of GPUs.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <string>

#include "kernels/cuda/variants.h"
#include "tests/kernels/linear/linear_problem.h"

namespace espalier::kernels::testing {
namespace {

struct Cell {
  bool stored = false;
  uint32_t bits = 0;
};

// Every element as the layout's arrays have it.
std::vector<Cell> CellsOf(const WeightView& w) {
  const size_t size = SizeOf(w.dtype);
  std::vector<Cell> cells(w.out * w.in);
  const auto put = [&](int64_t I, int64_t J, int64_t slot) {
    for (int64_t r = 0; r < w.block_rows; ++r) {
      for (int64_t c = 0; c < w.block_cols; ++c) {
        const int64_t row = I * w.block_rows + r, col = J * w.block_cols + c;
        if (row >= w.out || col >= w.in) continue;
        Cell& cell = cells[row * w.in + col];
        cell.stored = true;
        std::memcpy(&cell.bits,
                    static_cast<const char*>(w.values) +
                        ((slot * w.block_rows + r) * w.block_cols + c) * size,
                    size);
      }
    }
  };
  const int64_t R = w.block_row_count(), C = w.block_col_count(), D = w.diagonal_length();
  for (int64_t I = 0; I < R && w.layout != Layout::kDiagonal; ++I) {
    if (w.layout == Layout::kDense) {
      for (int64_t J = 0; J < C; ++J) put(I, J, I * C + J);
      continue;
    }
    for (int64_t i = w.row_ptr[I]; i < w.row_ptr[I + 1]; ++i) put(I, w.Column(i), i);
  }
  for (int64_t k = 0; k < w.count && w.layout == Layout::kDiagonal; ++k) {
    for (int64_t t = 0; t < D; ++t) {
      const BlockPosition at = DiagonalBlock(R, C, w.offsets[k], t);
      put(at.row, at.col, k * D + t);
    }
  }
  return cells;
}

std::vector<const LinearVariant*> AllVariants() {
  std::vector<const LinearVariant*> all;
  for (const LinearVariant& variant : LinearVariants()) all.push_back(&variant);
  for (const LinearVariant& variant : cuda::CudaLinearVariants()) {
    if (variant.locate != nullptr) all.push_back(&variant);
  }
  return all;
}

class LocateTest : public ::testing::TestWithParam<const LinearVariant*> {
 protected:
  const LinearVariant& variant_ = *GetParam();

  DType dtype() const {
    const std::string name = variant_.name;
    return name.find("bf16") != std::string::npos   ? DType::kBFloat16
           : name.find("_f16") != std::string::npos ? DType::kFloat16
                                                    : DType::kFloat32;
  }
  bool Takes(const WeightView& weight) const {
    return variant_.supports(
        DescOf(weight, 1, variant_.arch == Arch::kCpu ? DType::kFloat32 : weight.dtype));
  }
  // Of elements that ascend: empty when every one is where `locate` says, or not stored and not found.
  std::string Compare(const WeightView& weight, const std::vector<int64_t>& elements) const {
    const std::vector<Cell> cells = CellsOf(weight);
    const ExactBuffer packed = PackFor(variant_, weight);
    const char* bytes =
        variant_.packing == nullptr ? static_cast<const char*>(weight.values) : packed.as<char>();
    WeightView without = PackedView(variant_, weight, packed);
    without.values = nullptr;
    std::vector<int64_t> offsets(elements.size(), -2);
    if (!variant_.locate(without, elements, offsets.data()).ok()) return "refused";
    for (size_t i = 0; i < elements.size(); ++i) {
      const Cell& cell = cells[elements[i]];
      const std::string where = "element " + std::to_string(elements[i]);
      if (cell.stored != (offsets[i] >= 0)) return where + " at " + std::to_string(offsets[i]);
      if (!cell.stored) continue;
      uint32_t bits = 0;
      std::memcpy(&bits, bytes + offsets[i], SizeOf(weight.dtype));
      if (bits != cell.bits) return where + " is not at " + std::to_string(offsets[i]);
    }
    return "";
  }
};

TEST_P(LocateTest, EveryElementIsWhereItWasPackedAndOthersAreNowhere) {
  constexpr int32_t kSides[][2] = {{1, 1},   {16, 16}, {32, 32},   {64, 64}, {16, 64},
                                   {64, 32}, {3, 5},   {128, 128}, {40, 8},  {1, 4}};
  constexpr int64_t kShapes[][2] = {{1, 1}, {97, 130}, {130, 97}, {128, 128}, {70, 300}, {300, 70}};
  std::mt19937_64 random(7);
  int checked = 0;
  for (const auto& [br, bc] : kSides) {
    for (const auto& [out, in] : kShapes) {
      for (const Pattern pattern :
           {Pattern::kScattered, Pattern::kBlocks, Pattern::kDiagonals, Pattern::kAllZero}) {
        const auto dense = MakeDense(out, in, pattern, 0.15, br, bc, random);
        const OwnedWeight weight = EncodeWeight(dense, out, in, variant_.layout, br, bc, dtype());
        if ((weight.block_rows != br || weight.block_cols != bc) || !Takes(weight.view())) continue;
        std::vector<int64_t> elements(out * in);
        std::iota(elements.begin(), elements.end(), 0);
        const std::string where = std::string(NameOf(pattern)) + " " + std::to_string(out) + "x" +
                                  std::to_string(in) + " in " + std::to_string(br) + "x" +
                                  std::to_string(bc);
        ASSERT_EQ(Compare(weight.view(), elements), "") << where;
        std::erase_if(elements, [&](int64_t) { return random() % 50 != 0; });
        ASSERT_EQ(Compare(weight.view(), elements), "") << where << ", a few elements";
        ++checked;
      }
    }
  }
  if (checked == 0) GTEST_SKIP() << "this machine has no kernel for it";
  EXPECT_GE(checked, 20);
}

INSTANTIATE_TEST_SUITE_P(Variants, LocateTest, ::testing::ValuesIn(AllVariants()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace espalier::kernels::testing
