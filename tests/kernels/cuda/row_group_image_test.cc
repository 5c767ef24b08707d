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

// Checks one half of a step, puts its values into `dense` and returns how many panels it has.
int CheckHalf(const RandomWeightSpec& spec, const RowGroupImage& image,
              const std::vector<char>& packed, int group, int half, const Step& step,
              std::vector<bool>* slab_used, std::vector<uint16_t>* dense) {
  EXPECT_GE(step.slabs, 1);
  EXPECT_LE(step.slabs, StepSlabs(image.panel_columns));
  EXPECT_LE(step.panels, StepPanels(spec.block_rows, image.panel_columns));
  EXPECT_EQ(step.row_end[HalfRows(spec.block_rows) - 1], step.panels);
  EXPECT_TRUE(std::is_sorted(step.row_end, step.row_end + kMaxHalfRows));
  EXPECT_TRUE(std::is_sorted(step.column, step.column + step.slabs));
  int row = 0;
  for (int p = 0; p < step.panels; ++p) {
    while (p >= step.row_end[row]) ++row;
    const int slab = step.x_offset[p] * 16 / SlabBytes(image.panel_columns);
    const int within = step.x_offset[p] * 16 % SlabBytes(image.panel_columns) / 2;
    EXPECT_LT(slab, step.slabs);
    EXPECT_LE(within + image.panel_columns, SlabColumns(image.panel_columns));
    (*slab_used)[slab] = true;
    const char* panel =
        packed.data() + image.values_offset + (step.first_panel + p) * image.panel_bytes;
    for (int r = 0; r < spec.block_rows; ++r) {
      for (int c = 0; c < image.panel_columns; ++c) {
        const int64_t first = (int64_t{group} * image.halves + half) * kHalfOutputs;
        const int64_t out = first + row * spec.block_rows + r;
        const int64_t in = step.column[slab] + within + c;
        if (out < spec.out && in < spec.in)
          (*dense)[out * spec.in + in] = PanelValue(panel, image.panel_columns, r, c);
      }
    }
  }
  return step.panels;
}

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
      const Step* step = steps + s * image.halves;
      std::vector<bool> slab_used(step->slabs, false);
      for (int half = 0; half < image.halves; ++half) {
        panels +=
            CheckHalf(spec, image, packed, groups[i].group, half, step[half], &slab_used, &dense);
        EXPECT_TRUE(std::equal(step->column, step->column + kMaxStepSlabs, step[half].column));
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
          CheckImage({layout, DType::kBFloat16, 512 + 9 * br - 3, 11 * bc - 1, br, bc, density});
        }
      }
    }
  }
}

// Slabs that the first group loads, as a share of all columns.
double SlabShare(int32_t block, int64_t out) {
  const RandomWeight weight({Layout::kBlockCsr, DType::kBFloat16, out, 16384, block, block, 0.1});
  std::vector<char> packed(RowGroupImageBytes(weight.view()));
  EXPECT_TRUE(PackRowGroupImage(weight.view(), packed.data()).ok());
  const RowGroupImage image = RowGroupImageOf(weight.view());
  const auto* group = reinterpret_cast<const GroupSpan*>(packed.data());
  const auto* steps = reinterpret_cast<const Step*>(packed.data() + image.steps_offset);
  int slabs = 0;
  for (int32_t s = group->begin; s < group->end; ++s) slabs += steps[s * image.halves].slabs;
  return slabs * SlabColumns(image.panel_columns) / 16384.0;
}

TEST(RowGroupImageTest, RowsOfOneGroupShareSlabs) {
  // 1 − 0.9^rows of the columns are used by any row of a group; loading each row's own would be rows × 10 %.
  EXPECT_NEAR(SlabShare(32, 256), 0.57, 0.06);
  EXPECT_NEAR(SlabShare(16, 512), 1.0, 0.02);
}

}  // namespace
}  // namespace espalier::kernels::cuda
