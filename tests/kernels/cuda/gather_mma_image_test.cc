// Every value of a scattered weight meets its x in the product that gather_mma_image.h describes, rows fetched together
// lie in different banks, and what fills the gaps multiplies zeros.
#include "kernels/cuda/gather_mma_image.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
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
      : layout(GatherMmaImageOf(weight.view())), bytes(GatherMmaImageBytes(weight.view())) {
    EXPECT_TRUE(PackGatherMmaImage(weight.view(), bytes.data()).ok());
  }
  template <typename Value>
  Value At(size_t offset, int64_t i) const {
    Value value;
    std::memcpy(&value, bytes.data() + offset + i * sizeof(Value), sizeof(Value));
    return value;
  }
  int32_t Tile(int64_t t) const { return At<int32_t>(0, t); }
  GatherImage layout;
  std::vector<char> bytes;
};

// Of 16 rows the one whose weights a lane holds, and the parity of the products that they are for: by the header's rule.
struct Lane {
  int row, parity;
};
Lane LaneRule(int lane) {
  const int g = lane / 4, q = lane % 4;
  return {q / 2 * 8 + g, (q ^ g / 4) % 2};
}

std::vector<uint16_t> UnpackDiagonals(const RandomWeightSpec& spec, const Image& image) {
  std::vector<uint16_t> dense(spec.out * spec.in, 0);
  for (int64_t tile = 0; tile < image.layout.tiles; ++tile) {
    for (int32_t unit = image.Tile(tile); unit < image.Tile(tile + 1); ++unit) {
      for (int lane = 0; lane < 32; ++lane) {
        const Lane rule = LaneRule(lane);
        for (int u = 0; u < 4; ++u) {
          for (int half = 0; half < 2; ++half) {
            // Starts are those of diagonals 0, 2, 1, 3; the lane holds 2 · parity and the next.
            const int64_t start =
                image.At<uint16_t>(image.layout.starts_offset, unit * 4 + half * 2 + rule.parity);
            const int row = 16 * u + rule.row;
            const auto value = image.At<uint16_t>(image.layout.units_offset + unit * size_t{512},
                                                  lane * 8 + u * 2 + half);
            PutAtPosition(spec, image.layout, tile * 64 + row, start + row, value, &dense);
          }
        }
      }
    }
  }
  return dense;
}

std::vector<uint16_t> UnpackCsr(const RandomWeightSpec& spec, const Image& image,
                                int64_t* conflicts) {
  std::vector<uint16_t> dense(spec.out * spec.in, 0);
  *conflicts = 0;
  for (int64_t tile = 0; tile < image.layout.tiles; ++tile) {
    for (int32_t unit = image.Tile(tile); unit < image.Tile(tile + 1); ++unit) {
      const size_t at = image.layout.units_offset + unit * size_t{512};
      const auto position = [&](int lane, int product) {
        return int64_t{image.At<uint16_t>(at + 256, lane * 4 + product)};
      };
      for (int lane = 0; lane < 32; ++lane) {
        const Lane rule = LaneRule(lane);
        for (int product = rule.parity; product < 4; product += 2) {
          for (int half = 0; half < 2; ++half) {
            const int fetcher = 16 * half + (rule.row ^ product % 2 * 4);
            const int64_t row = image.At<int32_t>(image.layout.starts_offset, tile * 16 + rule.row);
            PutAtPosition(spec, image.layout, row, position(fetcher, product),
                          image.At<uint16_t>(at, lane * 4 + product / 2 * 2 + half), &dense);
          }
        }
      }
      for (int product = 0; product < 4; ++product) {
        for (int matrix = 0; matrix < 4; ++matrix) {
          std::set<int64_t> banks;
          for (int i = 0; i < 8; ++i) banks.insert(position(8 * matrix + i, product) % 8);
          *conflicts += 8 - static_cast<int64_t>(banks.size());
        }
      }
    }
  }
  return dense;
}

TEST(GatherMmaImageTest, DiagonalsOfEveryShapeAreWhole) {
  for (const auto& [out, in] :
       {std::pair{100, 100}, {64, 64}, {300, 70}, {70, 300}, {1, 1}, {1, 50}, {129, 1}, {65, 64}}) {
    for (double density : {0.0, 0.1, 0.5, 1.0}) {
      const RandomWeightSpec spec{Layout::kDiagonal, DType::kBFloat16, out, in, 1, 1, density};
      const RandomWeight weight(spec);
      EXPECT_EQ(UnpackDiagonals(spec, Image(weight)), DenseOf(weight)) << ToString(spec);
    }
  }
}

TEST(GatherMmaImageTest, RowsOfCsrAreWhole) {
  for (const auto& [out, in] : {std::pair{100, 90}, {32, 7}, {1, 1}, {97, 211}, {130, 64}}) {
    for (double density : {0.0, 0.05, 0.4, 1.0}) {
      const RandomWeightSpec spec{Layout::kCsr, DType::kFloat16, out, in, 1, 1, density};
      const RandomWeight weight(spec);
      int64_t conflicts;
      EXPECT_EQ(UnpackCsr(spec, Image(weight), &conflicts), DenseOf(weight)) << ToString(spec);
    }
  }
}

TEST(GatherMmaImageTest, NeighboursInAProductRarelyShareABank) {
  const RandomWeightSpec spec{Layout::kCsr, DType::kBFloat16, 512, 4096, 1, 1, 0.02};
  const RandomWeight weight(spec);
  const Image image(weight);
  int64_t conflicts;
  UnpackCsr(spec, image, &conflicts);
  const auto fetched = static_cast<double>(image.Tile(image.layout.tiles)) * 16 * 8;
  EXPECT_LT(static_cast<double>(conflicts), 0.05 * fetched);
}

// Rows sorted by length in windows of 64: little is filled up.
TEST(GatherMmaImageTest, RowsOfUnequalLengthTakeLittleRoom) {
  const RandomWeight weight({Layout::kCsr, DType::kBFloat16, 4096, 4096, 1, 1, 0.05});
  const double stored = static_cast<double>(weight.values.size()) / 2;
  EXPECT_LT(static_cast<double>(GatherMmaImageBytes(weight.view())), 1.1 * 4 * stored);
}

TEST(GatherMmaImageTest, ElementsAreFoundWhereTheyWerePut) {
  for (Layout layout : {Layout::kCsr, Layout::kDiagonal}) {
    for (const auto& [out, in] : {std::pair{200, 90}, {90, 200}, {64, 64}}) {
      const RandomWeightSpec spec{layout, DType::kBFloat16, out, in, 1, 1, 0.2};
      const RandomWeight weight(spec);
      const Image image(weight);
      const std::vector<uint16_t> dense = DenseOf(weight);
      std::vector<int64_t> elements(dense.size()), offsets(dense.size());
      for (size_t i = 0; i < elements.size(); ++i) elements[i] = static_cast<int64_t>(i);
      ASSERT_TRUE(LocateInGatherMmaImage(weight.view(), elements, offsets.data()).ok());
      std::set<int64_t> places;
      for (size_t i = 0; i < elements.size(); ++i) {
        if (offsets[i] < 0) {
          EXPECT_EQ(dense[i], 0) << ToString(spec) << " element " << i;
          continue;
        }
        EXPECT_TRUE(places.insert(offsets[i]).second);
        EXPECT_EQ(image.At<uint16_t>(offsets[i], 0), dense[i])
            << ToString(spec) << " element " << i;
      }
    }
  }
}

TEST(GatherMmaImageTest, WideLayersAreRefused) {
  const auto fits = [](Layout layout, DType type, int64_t in, bool shares) {
    return FitsGatherMmaImage({8, 64, in, layout, type, type, 1, 1, 10}, shares);
  };
  EXPECT_TRUE(fits(Layout::kCsr, DType::kBFloat16, 13'432, false));
  EXPECT_FALSE(fits(Layout::kCsr, DType::kBFloat16, 13'433, false));
  EXPECT_TRUE(fits(Layout::kDiagonal, DType::kFloat16, 13'312, false));
  EXPECT_FALSE(fits(Layout::kDiagonal, DType::kFloat16, 13'313, false));
  EXPECT_FALSE(fits(Layout::kDiagonal, DType::kFloat16, 13'312, true));
  EXPECT_TRUE(fits(Layout::kDiagonal, DType::kFloat16, 11'072, true));
  EXPECT_FALSE(fits(Layout::kCsr, DType::kFloat32, 100, false));
}

}  // namespace
}  // namespace espalier::kernels::cuda
