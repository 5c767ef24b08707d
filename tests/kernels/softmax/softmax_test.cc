#include "kernels/softmax/softmax.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace espalier::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<double> Reference(const std::vector<float>& x, int64_t outer, int64_t n,
                              int64_t inner) {
  std::vector<double> y(x.size());
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t j = 0; j < inner; ++j) {
      const auto at = [&](int64_t i) { return (o * n + i) * inner + j; };
      double top = -kInfinity, sum = 0;
      for (int64_t i = 0; i < n; ++i) top = std::max<double>(top, x[at(i)]);
      for (int64_t i = 0; i < n; ++i) sum += std::exp(x[at(i)] - top);
      for (int64_t i = 0; i < n; ++i) y[at(i)] = std::exp(x[at(i)] - top) / sum;
    }
  }
  return y;
}

TEST(SoftmaxTest, EveryShapeMatchesTheDefinition) {
  std::mt19937 random(5);
  for (const float range : {1.0f, 20.0f, 300.0f}) {
    std::uniform_real_distribution<float> uniform(-range, range);
    for (const int64_t outer : {0, 1, 3, 40}) {
      for (const int64_t n : {1, 2, 10, 15, 16, 17, 33, 1000}) {
        for (const int64_t inner : {0, 1, 2, 16, 19}) {
          std::vector<float> x(outer * n * inner), y(x.size() + 1, -77);
          for (float& v : x) v = uniform(random);
          ASSERT_TRUE(Softmax({}, {x.data(), y.data(), outer, n, inner}).ok());
          const auto expected = Reference(x, outer, n, inner);
          // The promise of softmax.h, and what rounding x − max (up to 2 · range) does to e^(x −
          // max).
          const double relative = (6 + static_cast<double>(n) / 16 + 2 * range) * 0x1p-24;
          for (size_t i = 0; i < x.size(); ++i) {
            ASSERT_NEAR(y[i], expected[i], expected[i] * relative + 0x1p-125)
                << "[" << outer << ", " << n << ", " << inner << "] at " << i;
          }
          ASSERT_EQ(y.back(), -77);
        }
      }
    }
  }
}

TEST(SoftmaxTest, ARowDoesNotDependOnItsNeighbours) {
  std::mt19937 random(6);
  std::uniform_real_distribution<float> uniform(-3, 3);
  for (const int64_t inner : {1, 3}) {
    std::vector<float> x(64 * 37 * inner), all(x.size()), alone(37 * inner);
    for (float& v : x) v = uniform(random);
    ASSERT_TRUE(Softmax({}, {x.data(), all.data(), 64, 37, inner}).ok());
    for (int64_t row = 0; row < 64; ++row) {
      ASSERT_TRUE(Softmax({}, {x.data() + row * 37 * inner, alone.data(), 1, 37, inner}).ok());
      for (int64_t i = 0; i < 37 * inner; ++i) ASSERT_EQ(all[row * 37 * inner + i], alone[i]);
    }
  }
}

TEST(SoftmaxTest, InfinitiesAndNanFollowTheFormula) {
  for (const int64_t inner : {1, 2}) {
    for (const int64_t n : {3, 40}) {
      const auto softmax = [&](float special, float others) {
        std::vector<float> x(n * inner, others);
        x[inner] = special;  // column 0 of the axis' second element
        EXPECT_TRUE(Softmax({}, {x.data(), x.data(), 1, n, inner}).ok());
        return x;
      };
      const auto masked = softmax(-kInfinity, 1);
      EXPECT_EQ(masked[inner], 0);
      EXPECT_NEAR(masked[0], 1.0 / static_cast<double>(n - 1), 1e-6);
      EXPECT_TRUE(std::isnan(softmax(std::nanf(""), 1)[0]));
      EXPECT_TRUE(std::isnan(softmax(kInfinity, 1)[inner]));
      EXPECT_TRUE(std::isnan(softmax(-kInfinity, -kInfinity)[0]));
      EXPECT_FLOAT_EQ(softmax(1e30f, -1e30f)[inner], 1);
    }
  }
}

TEST(SoftmaxTest, BrokenContractsAreRefused) {
  float v = 0;
  EXPECT_EQ(Softmax({}, {&v, &v, 1, 0, 1}).code, KernelCode::kInvalidArgument);
  EXPECT_EQ(Softmax({}, {&v, &v, -1, 1, 1}).code, KernelCode::kInvalidArgument);
  EXPECT_EQ(Softmax({.arch = Arch::kSm80}, {&v, &v, 1, 1, 1}).code, KernelCode::kUnsupported);
}

}  // namespace
}  // namespace espalier::kernels
