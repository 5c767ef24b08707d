#include "kernels/block_csr_linear/block_steps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>

#include "kernels/block_csr_linear/block_csr_linear.h"
#include "tests/kernels/linear/linear_problem.h"

namespace espalier::kernels::testing {
namespace {

using ::testing::ContainerEq;

// Which blocks are where; no values.
struct Blocks {
  int64_t out, in;
  int32_t rows, cols;
  DType dtype = DType::kBFloat16;
  std::vector<int32_t> row_ptr = {0};
  std::vector<uint16_t> columns;

  void AddRow(const std::vector<int32_t>& row) {
    columns.insert(columns.end(), row.begin(), row.end());
    row_ptr.push_back(static_cast<int32_t>(columns.size()));
  }
  WeightView view() const {
    WeightView w = {Layout::kBlockCsr, dtype, out, in, rows, cols};
    w.count = static_cast<int64_t>(columns.size());
    w.row_ptr = row_ptr.data();
    w.col_idx16 = columns.data();
    return w;
  }
};

// Blocks of 1 x 4 whose steps take one byte and more, at a row's start, within it and at its end, in a few groups of
// kAnchorRows rows.
Blocks OddRows(int32_t columns) {
  Blocks blocks = {0, int64_t{4} * columns, 1, 4};
  const int32_t last = columns - 1;
  blocks.AddRow({});
  blocks.AddRow({0});
  blocks.AddRow({last});
  blocks.AddRow({});
  for (const int32_t skip : {1, 253, 254, 255, 256, 257, 509, 510, 511, 512, 765}) {
    blocks.AddRow({skip});
    blocks.AddRow({0, 1 + skip});
    blocks.AddRow({0, 1 + skip, 2 + 2 * skip, 3 + 3 * skip, 4 + 4 * skip, last});
  }
  for (const int32_t count : {63, 255, 256, 511}) {
    for (const int32_t far : {0, 255, 510}) {
      std::vector<int32_t> row(count);
      std::iota(row.begin(), row.end(), 0);
      row.back() += far;
      blocks.AddRow(row);
    }
  }
  blocks.AddRow({});
  blocks.out = static_cast<int64_t>(blocks.row_ptr.size()) - 1;
  return blocks;
}

TEST(BlockStepsTest, EveryNumberOfSkippedColumnsComesBackFromEveryRow) {
  for (const int32_t columns : {4096, 65536}) {
    const Blocks blocks = OddRows(columns);
    const WeightView w = blocks.view();
    BlockStepsSize size(w.out);
    for (int64_t row = 0; row < w.out; ++row) {
      for (int64_t i = w.row_ptr[row]; i < w.row_ptr[row + 1]; ++i) size.Block(row, w.Column(i));
    }
    const ExactBuffer index(size.bytes());
    EXPECT_EQ(WriteBlockSteps(w, index.as()), index.as<std::byte>() + size.bytes());

    const uint8_t* at = StepsOfRow(w, index.as(), 0);
    for (int64_t row = 0; row < w.out; ++row) {
      EXPECT_EQ(StepsOfRow(w, index.as(), row), at) << "row " << row;
      int64_t next = 0;
      for (int64_t i = w.row_ptr[row]; i < w.row_ptr[row + 1]; ++i) {
        const int64_t column = next + NextStep(at);
        ASSERT_EQ(column, w.Column(i)) << "block " << i << " in row " << row;
        next = column + 1;
      }
    }
    EXPECT_EQ(at, index.as<uint8_t>() + size.bytes());
  }
}

TEST(BlockStepsTest, KernelsAndLocateFollowIt) {
  const LinearVariant* const variant = FindLinearVariantOrNull("block_csr_linear_bf16_cpu_strips");
  ASSERT_NE(variant, nullptr);
  const Blocks blocks = OddRows(65536);
  std::vector<uint16_t> values(4 * blocks.columns.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(0x3f00 + i % 0x100);
  WeightView weight = blocks.view();
  weight.values = values.data();
  const ExactBuffer packed = PackFor(*variant, weight);
  const WeightView held = PackedView(*variant, weight, packed);
  ASSERT_EQ(held.col_idx16, nullptr);

  std::mt19937_64 random(3);
  for (const int64_t tokens : {1, 20, 70}) {
    for (const int threads : {1, 3}) {
      std::vector<float> x(tokens * weight.in);
      for (float& value : x) value = static_cast<float>(random() % 1000) / 1000 - 0.5f;
      std::string error;
      const std::vector<float> y =
          RunVariant(*variant, held, x, tokens, nullptr, {.threads = threads}, &error);
      EXPECT_EQ(error, "");
      EXPECT_EQ(CompareWithReference(weight, x, tokens, nullptr, {}, y), "");
    }
  }

  std::vector<int64_t> elements, expected;
  for (int64_t row = 0, i = 0; row < weight.out; ++row) {
    for (int64_t col = 0; col < weight.in; ++col) {
      const bool stored = i < weight.row_ptr[row + 1] && weight.Column(i) == col / 4;
      elements.push_back(row * weight.in + col);
      expected.push_back(stored ? 2 * (4 * i + col % 4) : -1);
      if (stored && col % 4 == 3) ++i;
    }
  }
  std::vector<int64_t> offsets(elements.size());
  ASSERT_TRUE(variant->locate(held, elements, offsets.data()).ok());
  EXPECT_THAT(offsets, ContainerEq(expected));
}

// Blocks at random in a weight [4096, 4096], so many that `sparsity` of it is zero.
Blocks RandomBlocks(int32_t side, DType dtype, double sparsity) {
  Blocks blocks = {4096, 4096, side, side, dtype};
  const int64_t R = blocks.out / side, C = blocks.in / side;
  std::mt19937_64 random(side);
  auto left = static_cast<int64_t>((1 - sparsity) * static_cast<double>(R * C) + 0.5);
  int64_t places = R * C;
  for (int64_t I = 0; I < R; ++I) {
    std::vector<int32_t> row;
    for (int64_t J = 0; J < C; ++J, --places) {
      if (static_cast<int64_t>(random() % places) >= left) continue;
      row.push_back(static_cast<int32_t>(J));
      --left;
    }
    blocks.AddRow(row);
  }
  return blocks;
}

// "weight_memory: smallest" promises density · dense bytes · 1.05.
TEST(BlockStepsTest, AWeightTakesAtMostFivePercentMoreThanItsValues) {
  for (const int32_t side : {4, 8, 16, 32, 64, 128}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const double sparsity : {0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99}) {
        const Blocks blocks = RandomBlocks(side, dtype, sparsity);
        const WeightView view = blocks.view();
        size_t bytes = BlockCsrLinearCpu::PackedBytes(view) + blocks.row_ptr.size() * 4;
        if (!BlockCsrLinearCpu::PacksColumns(view)) bytes += view.count * 2;
        EXPECT_LE(static_cast<double>(bytes),
                  1.05 * static_cast<double>(view.count * side * side * SizeOf(dtype)))
            << "blocks of " << side << ", " << espalier::NameOf(dtype) << ", " << sparsity;
      }
    }
  }
}

}  // namespace
}  // namespace espalier::kernels::testing
