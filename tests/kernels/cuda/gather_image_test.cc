// Every value of a scattered weight is found where gather_image.h says, and what fills the gaps multiplies zeros.
#include "kernels/cuda/gather_image.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/kernels/cuda/put_at_position.h"
#include "tests/kernels/cuda/random_weight.h"
#include "tests/kernels/cuda/unpack.h"

namespace espalier::kernels::cuda {
namespace {

using testing::DenseOf;
using testing::PutAtPosition;
using testing::RandomWeight;
using testing::RandomWeightSpec;

struct Image {
  explicit Image(const RandomWeight& weight)
      : layout(GatherImageOf(weight.view())), bytes(GatherImageBytes(weight.view())) {
    EXPECT_TRUE(PackGatherImage(weight.view(), bytes.data()).ok());
    tiles = reinterpret_cast<const int32_t*>(bytes.data());
    starts = reinterpret_cast<const uint16_t*>(bytes.data() + layout.starts_offset);
    units = reinterpret_cast<const uint16_t*>(bytes.data() + layout.units_offset);
  }
  GatherImage layout;
  std::vector<char> bytes;
  const int32_t* tiles;
  const uint16_t* starts;
  const uint16_t* units;
};

void CheckDiagonal(const RandomWeightSpec& spec) {
  const RandomWeight weight(spec);
  const Image image(weight);
  std::vector<uint16_t> dense(spec.out * spec.in, 0);
  for (int64_t tile = 0; tile < image.layout.tiles; ++tile) {
    for (int32_t u = image.tiles[tile]; u < image.tiles[tile + 1]; ++u) {
      for (int lane = 0; lane < 32; ++lane) {
        for (int d = 0; d < 4; ++d) {
          for (int half = 0; half < 2; ++half) {
            const int j = lane + 32 * half;
            PutAtPosition(spec, image.layout, tile * 64 + j, image.starts[u * 4 + d] + j,
                          image.units[u * 256 + lane * 8 + d * 2 + half], &dense);
          }
        }
      }
    }
  }
  EXPECT_EQ(dense, DenseOf(weight)) << ToString(spec);
}

TEST(GatherImageTest, DiagonalsOfEveryShapeAreWhole) {
  for (const auto& [out, in] :
       {std::pair{100, 100}, {64, 64}, {300, 70}, {70, 300}, {1, 1}, {1, 50}, {129, 1}, {65, 64}}) {
    for (double density : {0.0, 0.1, 0.5, 1.0}) {
      CheckDiagonal({Layout::kDiagonal, DType::kBFloat16, out, in, 1, 1, density});
    }
  }
}

TEST(GatherImageTest, DiagonalsThatMissATileOfATallLayerAreLeftOut) {
  const RandomWeight weight({Layout::kDiagonal, DType::kBFloat16, 4096, 256, 1, 1, 0.1});
  const double values = static_cast<double>(weight.values.size());
  EXPECT_LT(static_cast<double>(GatherImageBytes(weight.view())), 1.6 * values);
}

TEST(GatherImageTest, RowsOfCsrAreWhole) {
  for (const auto& [out, in] : {std::pair{100, 90}, {32, 7}, {1, 1}, {97, 211}}) {
    for (double density : {0.0, 0.05, 0.4, 1.0}) {
      const RandomWeightSpec spec{Layout::kCsr, DType::kFloat16, out, in, 1, 1, density};
      const RandomWeight weight(spec);
      const Image image(weight);
      std::vector<uint16_t> dense(spec.out * spec.in, 0);
      for (int64_t tile = 0; tile < image.layout.tiles; ++tile) {
        for (int32_t u = image.tiles[tile]; u < image.tiles[tile + 1]; ++u) {
          for (int lane = 0; lane < 32; ++lane) {
            const uint16_t* words = image.units + u * 256 + lane * 8;
            for (int e = 0; e < 4; ++e)
              PutAtPosition(spec, image.layout, tile * 32 + lane, words[e], words[4 + e], &dense);
          }
        }
      }
      EXPECT_EQ(dense, DenseOf(weight)) << ToString(spec);
    }
  }
}

// fp32: a lane has one row; the 16-bit positions of csr follow the values of a unit.
TEST(GatherImageTest, Fp32WeightsOfBothLayoutsAreWhole) {
  for (Layout layout : {Layout::kCsr, Layout::kDiagonal}) {
    for (const auto& [out, in] : {std::pair{100, 90}, {32, 7}, {1, 1}, {70, 300}, {300, 70}}) {
      for (double density : {0.0, 0.1, 1.0}) {
        const RandomWeightSpec spec{layout, DType::kFloat32, out, in, 1, 1, density};
        const RandomWeight weight(spec);
        const Image image(weight);
        const bool is_csr = layout == Layout::kCsr;
        const char* units = image.bytes.data() + image.layout.units_offset;
        std::vector<float> dense(spec.out * spec.in, 0);
        for (int64_t tile = 0; tile < image.layout.tiles; ++tile) {
          for (int32_t u = image.tiles[tile]; u < image.tiles[tile + 1]; ++u) {
            const char* unit = units + int64_t{u} * (is_csr ? 768 : 512);
            for (int lane = 0; lane < 32; ++lane) {
              for (int e = 0; e < 4; ++e) {
                float value;
                std::memcpy(&value, unit + lane * 16 + e * 4, 4);
                const int64_t position =
                    is_csr ? reinterpret_cast<const uint16_t*>(unit + 512)[lane * 4 + e]
                           : image.starts[u * 4 + e] + lane;
                const int64_t row = tile * 32 + lane, column = position % image.layout.modulus;
                ASSERT_LT(position, image.layout.positions);
                if (position < image.layout.wrapped && column < in && row < out) {
                  if (value != 0) dense[row * in + column] = value;
                } else {
                  ASSERT_EQ(value, 0);
                }
              }
            }
          }
        }
        EXPECT_EQ(dense, DenseOf<float>(weight)) << ToString(spec);
      }
    }
  }
}

TEST(GatherImageTest, PositionsThatDoNotFit16BitsAreRefused) {
  LinearDesc desc{1, 70000, 100, Layout::kDiagonal, DType::kBFloat16, DType::kBFloat16, 1, 1, 10};
  EXPECT_FALSE(FitsGatherImage(desc));
  desc.out = 60000;
  EXPECT_TRUE(FitsGatherImage(desc));
  desc.block_rows = desc.block_cols = 16;
  EXPECT_FALSE(FitsGatherImage(desc));
}

}  // namespace
}  // namespace espalier::kernels::cuda
