// Every value of a scattered weight is found once where two_four_image.h says, and pieces are of the kind that fits.
#include "kernels/cuda/two_four_image.h"

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

struct Image {
  explicit Image(const RandomWeight& weight)
      : layout(TwoFourImageOf(weight.view())), bytes(TwoFourImageBytes(weight.view())) {
    EXPECT_TRUE(PackTwoFourImage(weight.view(), bytes.data()).ok());
    groups = reinterpret_cast<const int32_t*>(bytes.data());
    panels = reinterpret_cast<const TwoFourPanel*>(bytes.data() + layout.panels_offset);
  }
  TwoFourImage layout;
  std::vector<char> bytes;
  const int32_t* groups;
  const TwoFourPanel* panels;
};

uint16_t DenseValue(const char* piece, int row, int column) {
  return PanelValue(piece, 32, row, column);
}

// As the tensor cores read it: the metadata names the columns of the two values of a group.
uint16_t SparseValue(const char* piece, int row, int column) {
  uint32_t word;
  std::memcpy(&word, piece + 2048 + 4 * (row / 16 * 16 + row % 8 * 2 + column / 16), 4);
  const uint32_t bits = word >> (row % 16 / 8 * 16 + column % 16 / 4 * 4) & 15;
  const int first = bits & 3, second = bits >> 2;
  EXPECT_LT(first, second) << "row " << row << " column " << column;
  if (column % 4 == first) return PanelValue(piece, 16, row, column / 4 * 2);
  if (column % 4 == second) return PanelValue(piece, 16, row, column / 4 * 2 + 1);
  return 0;
}

struct Counts {
  int none = 0, sparse = 0, dense = 0;
};

// The weight that the image stands for, checked against the weight itself.
Counts CheckWhole(const RandomWeightSpec& spec) {
  const RandomWeight weight(spec);
  const Image image(weight);
  std::vector<uint16_t> dense(spec.out * spec.in, 0);
  Counts counts;
  size_t at = image.layout.pieces_offset;
  for (int64_t g = 0; g < image.layout.groups; ++g) {
    for (int32_t p = image.groups[g]; p < image.groups[g + 1]; ++p) {
      EXPECT_TRUE(p == image.groups[g] ||
                  image.panels[2 * p].column > image.panels[2 * p - 2].column);
      for (int half = 0; half < 2; ++half) {
        const TwoFourPanel& panel = image.panels[2 * p + half];
        EXPECT_EQ(panel.column, image.panels[2 * p].column);
        EXPECT_EQ(image.layout.pieces_offset + panel.begin * 256, at);
        size_t stored[2] = {};  // of 64 rows each
        for (int piece = 0; piece < 4; ++piece) {
          const uint32_t place = panel.pieces >> (8 * piece) & 255;
          if (place == 0) {
            ++counts.none;
            continue;
          }
          const bool is_dense = place >= 128;
          EXPECT_TRUE(is_dense || place >= 64);
          const char* bytes = image.bytes.data() + at + place % 64 * 256 +
                              (piece < 2 ? 0 : panel.sizes % 65536 * 256);
          EXPECT_TRUE(!is_dense || place % 2 == 0) << "swizzled over 512 bytes";
          for (int r = 0; r < 64; ++r) {
            for (int c = 0; c < 32; ++c) {
              const int64_t row = g * 256 + half * 128 + piece / 2 * 64 + r,
                            column = panel.column + piece % 2 * 32 + c;
              const uint16_t value = is_dense ? DenseValue(bytes, r, c) : SparseValue(bytes, r, c);
              if (row < spec.out && column < spec.in) {
                dense[row * spec.in + column] = value;
              } else {
                EXPECT_EQ(value, 0) << "beyond the weight: row " << row << " column " << column;
              }
            }
          }
          stored[piece / 2] += is_dense ? 4096 : 2304;
          ++(is_dense ? counts.dense : counts.sparse);
        }
        EXPECT_EQ(stored[0], panel.sizes % 65536 * 256);
        EXPECT_EQ(stored[1], panel.sizes / 65536 * 256);
        at += stored[0] + stored[1];
      }
    }
  }
  EXPECT_EQ(image.bytes.size(), at);
  EXPECT_EQ(dense, DenseOf(weight)) << ToString(spec);
  return counts;
}

TEST(TwoFourImageTest, EveryValueIsWhereTheTensorCoresReadIt) {
  for (Layout layout : {Layout::kCsr, Layout::kDiagonal}) {
    for (const auto& [out, in] : {std::pair{256, 64},
                                  {100, 100},
                                  {300, 70},
                                  {70, 300},
                                  {1, 1},
                                  {1, 50},
                                  {513, 3},
                                  {600, 500}}) {
      for (double density : {0.0, 0.02, 0.1, 0.5, 1.0}) {
        CheckWhole({layout, DType::kBFloat16, out, in, 1, 1, density});
      }
    }
  }
}

TEST(TwoFourImageTest, DiagonalsAreMostlySparsePiecesAtNinetyPercent) {
  const Counts counts = CheckWhole({Layout::kDiagonal, DType::kFloat16, 1024, 1024, 1, 1, 0.1});
  EXPECT_LT(counts.dense, counts.sparse);
  EXPECT_GT(counts.sparse, 0);
}

TEST(TwoFourImageTest, AWeightPrunedToTwoOfFourHasNoDensePiece) {
  RandomWeight weight({Layout::kCsr, DType::kBFloat16, 200, 300, 1, 1, 1.0});
  std::vector<int32_t> row_ptr = {0}, columns;
  for (int row = 0; row < 200; ++row) {
    for (int c = 0; c < 300; ++c) {
      if (c % 4 == row % 4 || c % 4 == (row + 1 + row / 4 % 3) % 4) columns.push_back(c);
    }
    row_ptr.push_back(static_cast<int32_t>(columns.size()));
  }
  weight.row_ptr = row_ptr;
  weight.col_idx = columns;
  weight.count = static_cast<int64_t>(columns.size());
  const Image image(weight);
  for (int32_t p = 0; p < image.groups[image.layout.groups]; ++p) {
    EXPECT_EQ((image.panels[2 * p].pieces | image.panels[2 * p + 1].pieces) & 0x80808080u, 0u);
  }
  EXPECT_GT(image.groups[image.layout.groups], 0);
}

TEST(TwoFourImageTest, WhatTheTensorCoresDoNotTakeIsRefused) {
  LinearDesc desc{1, 700, 100, Layout::kDiagonal, DType::kBFloat16, DType::kBFloat16, 1, 1, 10};
  EXPECT_TRUE(FitsTwoFourImage(desc));
  desc.block_rows = desc.block_cols = 16;
  EXPECT_FALSE(FitsTwoFourImage(desc));
  desc.block_rows = desc.block_cols = 1;
  desc.weight_dtype = desc.io_dtype = DType::kFloat32;
  EXPECT_FALSE(FitsTwoFourImage(desc));
  LinearDesc huge{1, 100000, 100000, Layout::kCsr, DType::kFloat16, DType::kFloat16, 1, 1, 10};
  EXPECT_FALSE(FitsTwoFourImage(huge)) << "ten values, and an index of 40 MB";
  LinearDesc many{1, 700, 100, Layout::kCsr, DType::kFloat16, DType::kFloat16, 1, 1, 70001};
  EXPECT_FALSE(FitsTwoFourImage(many)) << "more values than elements";
}

}  // namespace
}  // namespace espalier::kernels::cuda
