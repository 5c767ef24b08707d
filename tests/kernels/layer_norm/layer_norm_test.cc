#include "kernels/layer_norm/layer_norm.h"

#include <cmath>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace espalier::kernels {
namespace {

struct Problem {
  std::vector<float> x, scale, bias;
  int64_t rows, n;
};

Problem MakeProblem(int64_t rows, int64_t n, float offset, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Problem problem = {std::vector<float>(rows * n), std::vector<float>(n), std::vector<float>(n),
                     rows, n};
  for (float& v : problem.x) v = offset + normal(random);
  for (float& v : problem.scale) v = normal(random);
  for (float& v : problem.bias) v = normal(random);
  return problem;
}

TEST(LayerNormTest, EveryLengthMatchesTheDefinition) {
  for (const float offset : {0.0f, 100.0f}) {
    for (const int64_t n : {1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 768, 4099}) {
      for (const bool with_bias : {false, true}) {
        const Problem p = MakeProblem(5, n, offset, 3);
        std::vector<float> y(p.x.size() + 1, -77);
        const float epsilon = 1e-5f;
        ASSERT_TRUE(LayerNorm({}, {p.x.data(), p.scale.data(), with_bias ? p.bias.data() : nullptr,
                                   y.data(), 5, n, epsilon})
                        .ok());
        for (int64_t row = 0; row < 5; ++row) {
          const float* x = &p.x[row * n];
          double mean = 0, variance = 0;
          for (int64_t i = 0; i < n; ++i) mean += x[i] / static_cast<double>(n);
          for (int64_t i = 0; i < n; ++i)
            variance += (x[i] - mean) * (x[i] - mean) / static_cast<double>(n);
          const double inverse = 1 / std::sqrt(variance + epsilon);
          // The mean is off by at most n/32 roundings of its size, and every difference inherits
          // that.
          const double mean_error =
              (2 + static_cast<double>(n) / 32) * 0x1p-24 * (std::abs(mean) + 1);
          for (int64_t i = 0; i < n; ++i) {
            const double expected =
                (x[i] - mean) * inverse * p.scale[i] + (with_bias ? p.bias[i] : 0);
            const double size =
                std::abs((x[i] - mean) * inverse * p.scale[i]) + std::abs(p.bias[i]);
            const double tolerance = (8 + static_cast<double>(n) / 32) * 0x1p-24 * size +
                                     2 * mean_error * inverse * std::abs(p.scale[i]);
            ASSERT_NEAR(y[row * n + i], expected, tolerance) << "n " << n << " at " << i;
          }
        }
        ASSERT_EQ(y.back(), -77);
      }
    }
  }
}

TEST(LayerNormTest, AConstantRowGivesTheBias) {
  Problem p = MakeProblem(1, 50, 0, 4);
  std::fill(p.x.begin(), p.x.end(), 3.0f);
  ASSERT_TRUE(
      LayerNorm({}, {p.x.data(), p.scale.data(), p.bias.data(), p.x.data(), 1, 50, 1e-5f}).ok());
  for (int i = 0; i < 50; ++i) EXPECT_FLOAT_EQ(p.x[i], p.bias[i]);
}

TEST(LayerNormTest, ARowDoesNotDependOnItsNeighbours) {
  const Problem p = MakeProblem(300, 130, 1, 5);
  std::vector<float> all(p.x.size()), alone(130);
  ASSERT_TRUE(
      LayerNorm({}, {p.x.data(), p.scale.data(), p.bias.data(), all.data(), 300, 130, 1e-5f}).ok());
  for (int64_t row = 0; row < 300; ++row) {
    ASSERT_TRUE(
        LayerNorm({}, {&p.x[row * 130], p.scale.data(), p.bias.data(), alone.data(), 1, 130, 1e-5f})
            .ok());
    for (int64_t i = 0; i < 130; ++i) ASSERT_EQ(all[row * 130 + i], alone[i]);
  }
}

TEST(LayerNormTest, BrokenContractsAreRefused) {
  float v = 0;
  EXPECT_EQ(LayerNorm({}, {&v, &v, &v, &v, 1, 0, 1}).code, KernelCode::kInvalidArgument);
  EXPECT_EQ(LayerNorm({}, {&v, &v, &v, &v, -1, 1, 1}).code, KernelCode::kInvalidArgument);
  EXPECT_EQ(LayerNorm({.arch = Arch::kSm80}, {&v, &v, &v, &v, 1, 1, 1}).code,
            KernelCode::kUnsupported);
}

}  // namespace
}  // namespace espalier::kernels
