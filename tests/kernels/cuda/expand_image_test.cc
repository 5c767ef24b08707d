// Every value of a scattered weight is found once where expand_image.h says, and stores of a warp spread over the banks.
#include "kernels/cuda/expand_image.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
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
      : layout(ExpandImageOf(weight.view())), bytes(ExpandImageBytes(weight.view())) {
    EXPECT_TRUE(PackExpandImage(weight.view(), bytes.data()).ok());
    tiles = reinterpret_cast<const int32_t*>(bytes.data());
    entries = reinterpret_cast<const uint32_t*>(bytes.data() + layout.quads_offset);
  }
  ExpandImage layout;
  std::vector<char> bytes;
  const int32_t* tiles;
  const uint32_t* entries;
};

// What the kernel does: zeros, and the entries stored over them.
std::vector<char> Expanded(const Image& image, int64_t tile) {
  std::vector<char> bytes(kExpandTileBytes, 0);
  for (int32_t i = 4 * image.tiles[tile]; i < 4 * image.tiles[tile + 1]; ++i) {
    const uint32_t at = image.entries[i] >> 16;
    const auto value = static_cast<uint16_t>(image.entries[i]);
    EXPECT_LE(at, kExpandTileBytes - 2u);
    std::memcpy(bytes.data() + at, &value, 2);
  }
  return bytes;
}

void CheckWhole(const RandomWeightSpec& spec) {
  const RandomWeight weight(spec);
  const Image image(weight);
  const int64_t rows = (spec.out + 63) / 64, columns = (spec.in + 63) / 64;
  std::vector<uint16_t> dense(spec.out * spec.in, 0);
  for (int64_t tile = 0; tile < rows * columns; ++tile) {
    const std::vector<char> bytes = Expanded(image, tile);
    for (int64_t r = 0; r < 64; ++r) {
      for (int64_t c = 0; c < 64; ++c) {
        const int64_t row = tile / columns * 64 + r, column = tile % columns * 64 + c;
        const uint16_t value =
            PanelValue(bytes.data(), 64, static_cast<int>(r), static_cast<int>(c));
        if (row < spec.out && column < spec.in) {
          dense[row * spec.in + column] = value;
        } else {
          ASSERT_EQ(value, 0) << "beyond the weight: row " << row << " column " << column;
        }
      }
    }
  }
  EXPECT_EQ(dense, DenseOf(weight)) << ToString(spec);
  const size_t quads = image.tiles[rows * columns];
  EXPECT_EQ(image.bytes.size(), image.layout.quads_offset + quads * 16);
}

TEST(ExpandImageTest, EveryValueIsExpandedWhereItBelongs) {
  for (Layout layout : {Layout::kCsr, Layout::kDiagonal}) {
    for (const auto& [out, in] :
         {std::pair{64, 64}, {100, 100}, {300, 70}, {70, 300}, {1, 1}, {1, 50}, {129, 1}}) {
      for (double density : {0.0, 0.02, 0.1, 0.5, 1.0}) {
        CheckWhole({layout, DType::kBFloat16, out, in, 1, 1, density});
      }
    }
  }
}

TEST(ExpandImageTest, TheStoresOfAWarpSpreadOverTheBanks) {
  const RandomWeight weight({Layout::kCsr, DType::kFloat16, 64, 64 * 8, 1, 1, 0.1});
  const Image image(weight);
  int stores = 0, clocks = 0;  // a store takes as many clocks as its fullest bank has words
  for (int tile = 0; tile < 8; ++tile) {
    const int begin = image.tiles[tile], quads = image.tiles[tile + 1] - begin;
    for (int warp = 0; warp < (quads + 31) / 32; ++warp) {
      for (int j = 0; j < 4; ++j, ++stores) {
        std::array<std::vector<uint32_t>, 32> words;
        for (int quad = 32 * warp; quad < std::min(quads, 32 * warp + 32); ++quad) {
          const uint32_t word = (image.entries[4 * (begin + quad) + j] >> 16) / 4;
          std::vector<uint32_t>& bank = words[word % 32];
          if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
        }
        size_t most = 1;
        for (const auto& bank : words) most = std::max(most, bank.size());
        clocks += static_cast<int>(most);
      }
    }
  }
  EXPECT_LT(clocks, 1.5 * stores) << "random banks would take about 3.5 clocks a store";
}

TEST(ExpandImageTest, WhatHasNoEntriesOfTwoBytesIsRefused) {
  LinearDesc desc{1, 700, 100, Layout::kDiagonal, DType::kBFloat16, DType::kBFloat16, 1, 1, 10};
  EXPECT_TRUE(FitsExpandImage(desc));
  desc.block_rows = desc.block_cols = 16;
  EXPECT_FALSE(FitsExpandImage(desc));
  desc.block_rows = desc.block_cols = 1;
  desc.weight_dtype = desc.io_dtype = DType::kFloat32;
  EXPECT_FALSE(FitsExpandImage(desc));
  LinearDesc csr{1, 700, 100, Layout::kCsr, DType::kFloat16, DType::kFloat16, 1, 1, 1};
  EXPECT_TRUE(FitsExpandImage(csr));
  csr.count = int64_t{1} << 31;
  EXPECT_FALSE(FitsExpandImage(csr));
}

constexpr ExpandClusters kH200 = {{132, 66, 30, 14}};

TEST(ExpandCutTest, TheSplitOfTheColumnsDoesNotDependOnTheTokens) {
  for (const auto& [out, in] : {std::pair{160, 160}, {48, 12}, {12, 48}, {1, 1}, {64, 64}}) {
    ExpandImage image;
    image.row_tiles = out;
    image.column_tiles = in;
    const int splits = CutExpandTiles(image, 1, 16, 6, kH200).splits;
    EXPECT_LE(splits, in);
    for (int64_t tokens : {16, 100, 5000}) {
      const ExpandCut cut = CutExpandTiles(image, tokens, tokens > 64 ? 128 : 16, 4, kH200);
      EXPECT_EQ(cut.splits, splits) << out << " x " << in << ", " << tokens << " tokens";
      EXPECT_GE(cut.row_tiles, 1);
      EXPECT_LE(cut.row_tiles, 4);
    }
  }
}

TEST(ExpandCutTest, ALargeSquareFillsTheDeviceInOneRound) {
  ExpandImage image;
  image.row_tiles = image.column_tiles = 160;
  const ExpandCut cut = CutExpandTiles(image, 16, 16, 6, kH200);
  const int64_t blocks = (160 + cut.row_tiles - 1) / cut.row_tiles * cut.splits;
  EXPECT_GE(blocks, 100);
  EXPECT_LE(blocks, 132);
}

}  // namespace
}  // namespace espalier::kernels::cuda
