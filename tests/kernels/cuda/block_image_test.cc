// What packing puts where: every value of a weight is found at the place that block_image.h promises, and nothing else.
#include "kernels/cuda/block_image.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/kernels/cuda/random_weight.h"
#include "tests/kernels/cuda/unpack.h"

namespace espalier::kernels::cuda {
namespace {

using testing::DenseOf;
using testing::PanelValue;
using testing::RandomWeight;
using testing::RandomWeightSpec;

TEST(BlockImageTest, SwizzleSpreadsEightRowsOverAllBankGroups) {
  for (int columns : {16, 32, 64}) {
    const int mask = SwizzleMask(columns);
    // The 16-byte chunk k of rows 0..7 must fall into eight different 16-byte bank groups of 128 bytes.
    for (int chunk = 0; chunk < columns / 8; ++chunk) {
      std::vector<bool> used(8, false);
      for (int row = 0; row < 8; ++row) {
        const int group = Swizzled(row * columns * 2 + chunk * 16, mask) / 16 % 8;
        EXPECT_FALSE(used[group]) << columns << " columns, chunk " << chunk << ", row " << row;
        used[group] = true;
      }
    }
  }
}

TEST(BlockImageTest, EveryValueOfEveryShapeAndLayoutIsWhereTheHeaderSays) {
  for (Layout layout : {Layout::kBlockCsr, Layout::kDiagonal}) {
    for (int32_t br : {16, 32, 64, 128}) {
      for (int32_t bc : {16, 32, 64, 128}) {
        for (double density : {0.0, 0.3, 1.0}) {
          const RandomWeightSpec spec{layout, DType::kBFloat16, 3 * br - 7, 4 * bc + 5, br,
                                      bc,     density};
          const RandomWeight weight(spec);
          const BlockImage image = BlockImageOf(weight.view());
          ASSERT_EQ(BlockImageBytes(weight.view()), image.bytes);
          std::vector<char> packed(image.bytes);
          ASSERT_TRUE(PackBlockImage(weight.view(), packed.data()).ok());
          const auto* rows = reinterpret_cast<const RowSpan*>(packed.data() + image.rows_offset);
          const auto* panels = reinterpret_cast<const Panel*>(packed.data() + image.panels_offset);

          std::vector<uint16_t> dense(spec.out * spec.in, 0);
          int64_t seen = 0;
          for (int64_t i = 0; i < image.block_rows_count; ++i) {
            if (i > 0) {
              EXPECT_LE(rows[i].end - rows[i].begin, rows[i - 1].end - rows[i - 1].begin);
            }
            for (int32_t p = rows[i].begin; p < rows[i].end; ++p, ++seen) {
              EXPECT_EQ(panels[p].row, rows[i].row);
              EXPECT_EQ(panels[p].begin, rows[i].begin);
              EXPECT_EQ(panels[p].end, rows[i].end);
              if (p > rows[i].begin) {
                EXPECT_GT(panels[p].column, panels[p - 1].column);
              }
              for (int r = 0; r < br; ++r) {
                for (int c = 0; c < image.panel_columns; ++c) {
                  const uint16_t value =
                      PanelValue(packed.data() + image.values_offset + p * image.panel_bytes,
                                 image.panel_columns, r, c);
                  const int64_t row = int64_t{rows[i].row} * br + r, column = panels[p].column + c;
                  if (row < spec.out && column < spec.in) {
                    dense[row * spec.in + column] = value;
                  } else {
                    EXPECT_EQ(value, 0);
                  }
                }
              }
            }
          }
          EXPECT_EQ(seen, image.panels);
          EXPECT_EQ(dense, DenseOf(weight)) << ToString(spec);
        }
      }
    }
  }
}

TEST(BlockImageTest, Fp32PanelsAreRowMajorAndAtMost32ColumnsWide) {
  for (int32_t side : {16, 32, 64, 128}) {
    const RandomWeightSpec spec{
        Layout::kBlockCsr, DType::kFloat32, 2 * side - 3, 3 * side + 1, side, side, 0.5};
    const RandomWeight weight(spec);
    const BlockImage image = BlockImageOf(weight.view());
    EXPECT_EQ(image.panel_columns, side == 16 ? 16 : 32);
    std::vector<char> packed(image.bytes);
    ASSERT_TRUE(PackBlockImage(weight.view(), packed.data()).ok());
    const auto* panels = reinterpret_cast<const Panel*>(packed.data() + image.panels_offset);
    const auto* values = reinterpret_cast<const float*>(packed.data() + image.values_offset);
    std::vector<float> dense(spec.out * spec.in, 0);
    for (int64_t p = 0; p < image.panels; ++p) {
      for (int64_t r = 0; r < side; ++r) {
        for (int64_t c = 0; c < image.panel_columns; ++c) {
          const int64_t row = int64_t{panels[p].row} * side + r, column = panels[p].column + c;
          const float value = values[(p * side + r) * image.panel_columns + c];
          if (row < spec.out && column < spec.in) dense[row * spec.in + column] = value;
        }
      }
    }
    EXPECT_EQ(dense, DenseOf<float>(weight)) << side;
  }
}

TEST(BlockImageTest, AWeightItCannotHoldIsRefusedByName) {
  const RandomWeight odd({Layout::kBlockCsr, DType::kBFloat16, 64, 64, 8, 8, 0.5});
  EXPECT_EQ(PackBlockImage(odd.view(), nullptr).code, KernelCode::kUnsupported);
  const RandomWeight narrow({Layout::kBlockCsr, DType::kFloat32, 64, 64, 8, 16, 0.5});
  EXPECT_EQ(PackBlockImage(narrow.view(), nullptr).code, KernelCode::kUnsupported);
}

TEST(BlockImageTest, IndexCostsAtMostFourPercentOfTheValues) {
  for (int32_t b : {16, 32, 64, 128}) {
    const RandomWeight weight({Layout::kDiagonal, DType::kBFloat16, 4096, 4096, b, b, 0.1});
    const double values = static_cast<double>(weight.values.size());
    EXPECT_LT(static_cast<double>(BlockImageBytes(weight.view())), 1.04 * values) << b;
  }
}

}  // namespace
}  // namespace espalier::kernels::cuda
