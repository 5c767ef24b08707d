// The steps of a row group: within their limits, in order, and together exactly the weight.
#include "kernels/cuda/row_group_image.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/kernels/cuda/random_weight.h"
#include "tests/kernels/cuda/unpack.h"

namespace espalier::kernels::cuda {
namespace {

using testing::DenseOf;
using testing::PanelValue;
using testing::RandomWeight;
using testing::RandomWeightSpec;

void CheckImage(const RandomWeightSpec& spec) {
  const RandomWeight weight(spec);
  const RowGroupImage image = RowGroupImageOf(weight.view());
  std::vector<char> packed(RowGroupImageBytes(weight.view()));
  ASSERT_TRUE(PackRowGroupImage(weight.view(), packed.data()).ok());
  const auto* groups = reinterpret_cast<const GroupSpan*>(packed.data());
  const auto* steps = reinterpret_cast<const Step*>(packed.data() + image.steps_offset);

  std::vector<uint16_t> dense(spec.out * spec.in, 0);
  std::vector<bool> group_seen(image.groups, false);
  int64_t panels = 0;
  for (int64_t i = 0; i < image.groups; ++i) {
    EXPECT_FALSE(group_seen[groups[i].group]);
    group_seen[groups[i].group] = true;
    if (i > 0) {
      EXPECT_LE(groups[i].end - groups[i].begin, groups[i - 1].end - groups[i - 1].begin);
    }
    for (int32_t s = groups[i].begin; s < groups[i].end; ++s) {
      const Step& step = steps[s];
      ASSERT_GE(step.slabs, 1);
      ASSERT_LE(step.slabs, StepSlabs(image.panel_columns));
      ASSERT_GE(step.panels, 1);
      ASSERT_LE(step.panels, StepPanels(spec.block_rows, image.panel_columns));
      EXPECT_EQ(step.row_end[GroupRows(spec.block_rows) - 1], step.panels);
      EXPECT_TRUE(std::is_sorted(step.row_end, step.row_end + kMaxGroupRows));
      EXPECT_TRUE(std::is_sorted(step.column, step.column + step.slabs));
      std::vector<bool> slab_used(step.slabs, false);
      int row = 0;
      for (int p = 0; p < step.panels; ++p, ++panels) {
        while (p >= step.row_end[row]) ++row;
        ASSERT_LT(step.slab[p], step.slabs);
        slab_used[step.slab[p]] = true;
        const char* panel = packed.data() + image.values_offset + (step.first_panel + p) * image.panel_bytes;
        for (int r = 0; r < spec.block_rows; ++r) {
          for (int c = 0; c < image.panel_columns; ++c) {
            const int64_t out = int64_t{groups[i].group} * kGroupOutputs + row * spec.block_rows + r;
            const int64_t in = step.column[step.slab[p]] + c;
            if (out < spec.out && in < spec.in) {
              dense[out * spec.in + in] = PanelValue(panel, image.panel_columns, r, c);
            }
          }
        }
      }
      EXPECT_TRUE(std::all_of(slab_used.begin(), slab_used.end(), [](bool used) { return used; }))
          << "a slab is loaded for nothing";
    }
  }
  EXPECT_EQ(panels, image.panels);
  EXPECT_EQ(dense, DenseOf(weight)) << ToString(spec);
}

TEST(RowGroupImageTest, StepsKeepTheirLimitsAndHoldTheWholeWeight) {
  for (Layout layout : {Layout::kBlockCsr, Layout::kDiagonal}) {
    for (int32_t br : {16, 32}) {
      for (int32_t bc : {16, 32, 64, 128}) {
        for (double density : {0.0, 0.1, 0.5, 1.0}) {
          CheckImage({layout, DType::kBFloat16, 256 + 5 * br - 3, 11 * bc - 1, br, bc, density});
        }
      }
    }
  }
}

TEST(RowGroupImageTest, RowsOfOneGroupShareSlabs) {
  // At 90 % sparsity 16 block rows use 81 % of the columns; loading each row's own would be 160 %.
  const RandomWeight weight({Layout::kBlockCsr, DType::kBFloat16, 256, 16384, 16, 16, 0.1});
  std::vector<char> packed(RowGroupImageBytes(weight.view()));
  ASSERT_TRUE(PackRowGroupImage(weight.view(), packed.data()).ok());
  const RowGroupImage image = RowGroupImageOf(weight.view());
  const auto* group = reinterpret_cast<const GroupSpan*>(packed.data());
  const auto* steps = reinterpret_cast<const Step*>(packed.data() + image.steps_offset);
  int slabs = 0;
  for (int32_t s = group->begin; s < group->end; ++s) slabs += steps[s].slabs;
  EXPECT_NEAR(slabs / 1024.0, 0.815, 0.04);
}

}  // namespace
}  // namespace espalier::kernels::cuda
