#include "kernels/elementwise/elementwise.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace espalier::kernels {
namespace {

// Two threads, in the worst order: what a task leaves to another is not there yet.
KernelContext Backwards() {
  KernelContext context;
  context.threads = 2;
  context.parallel_for = [](void*, int64_t n, KernelContext::Task task, void* arg) {
    for (int64_t i = n - 1; i >= 0; --i) task(arg, i);
  };
  return context;
}

std::vector<float> Random(int64_t count, float low, float high, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> values(count);
  for (float& v : values) v = uniform(random);
  return values;
}

float Apply(BinaryOp op, float a, float b) {
  switch (op) {
    case BinaryOp::kAdd:
      return a + b;
    case BinaryOp::kSub:
      return a - b;
    case BinaryOp::kMul:
      return a * b;
    case BinaryOp::kDiv:
      return a / b;
  }
  return 0;
}

constexpr BinaryOp kOps[] = {BinaryOp::kAdd, BinaryOp::kSub, BinaryOp::kMul, BinaryOp::kDiv};

TEST(BinaryTest, RowsOfEveryLengthAndStrideAreExact) {
  for (const BinaryOp op : kOps) {
    for (const int64_t n : {0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 100, 32767, 32768, 32769, 70001}) {
      for (const int64_t a_stride : {0, 1}) {
        for (const int64_t b_stride : {0, 1}) {
          const auto a = Random(std::max<int64_t>(n, 1), -2, 2, 1),
                     b = Random(std::max<int64_t>(n, 1), 1, 2, 2);
          std::vector<float> y(n + 1, -77);
          BinaryArgs args = {op, 1, {n}, {a_stride}, {b_stride}, a.data(), b.data(), y.data()};
          ASSERT_TRUE(Binary(Backwards(), args).ok());
          for (int64_t i = 0; i < n; ++i)
            ASSERT_EQ(y[i], Apply(op, a[i * a_stride], b[i * b_stride])) << i << " of " << n;
          ASSERT_EQ(y[n], -77) << "wrote beyond the end";
        }
      }
    }
  }
}

TEST(BinaryTest, EveryPatternOfBroadcastAxesMatchesTheDefinition) {
  const int64_t dims[4] = {3, 5, 2, 19};
  for (int mask = 0; mask < 256; ++mask) {
    BinaryArgs args;
    args.op = BinaryOp::kSub;
    args.rank = 4;
    int64_t a_size = 1, b_size = 1;
    for (int axis = 3; axis >= 0; --axis) {
      args.dims[axis] = dims[axis];
      if (mask >> axis & 1) {
        args.a_strides[axis] = a_size;
        a_size *= dims[axis];
      }
      if (mask >> (axis + 4) & 1) {
        args.b_strides[axis] = b_size;
        b_size *= dims[axis];
      }
    }
    const auto a = Random(a_size, -1, 1, 1), b = Random(b_size, -1, 1, 2);
    std::vector<float> y(3 * 5 * 2 * 19);
    args.a = a.data();
    args.b = b.data();
    args.y = y.data();
    ASSERT_EQ(Binary(Backwards(), args).ok(), true);
    for (size_t i = 0; i < y.size(); ++i) {
      int64_t rest = static_cast<int64_t>(i), ia = 0, ib = 0;
      for (int axis = 3; axis >= 0; --axis) {
        ia += rest % dims[axis] * args.a_strides[axis];
        ib += rest % dims[axis] * args.b_strides[axis];
        rest /= dims[axis];
      }
      ASSERT_EQ(y[i], a[ia] - b[ib]) << "mask " << mask << " at " << i;
    }
  }
}

TEST(BinaryTest, WorksInPlace) {
  auto a = Random(1000, -1, 1, 1);
  const auto b = Random(10, -1, 1, 2), before = a;
  BinaryArgs args = {BinaryOp::kMul, 2, {100, 10}, {10, 1}, {0, 1}, a.data(), b.data(), a.data()};
  ASSERT_TRUE(Binary(Backwards(), args).ok());
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(a[i], before[i] * b[i % 10]);
}

TEST(BinaryTest, BrokenContractsAreRefused) {
  float v = 0;
  BinaryArgs args = {BinaryOp::kAdd, 0, {1}, {1}, {1}, &v, &v, &v};
  EXPECT_EQ(Binary({}, args).code, KernelCode::kInvalidArgument);
  args.rank = kMaxBroadcastRank + 1;
  EXPECT_EQ(Binary({}, args).code, KernelCode::kInvalidArgument);
  args.rank = 1;
  args.a_strides[0] = 2;
  EXPECT_EQ(Binary({}, args).code, KernelCode::kInvalidArgument);
  args.a_strides[0] = 1;
  EXPECT_EQ(Binary({.arch = Arch::kSm90}, args).code, KernelCode::kUnsupported);
}

double Expected(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < 0 ? 0 : x;
    case Activation::kGeluErf:
      return x / 2 * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh:
      return x / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kSigmoid:
      return 1 / (1 + std::exp(-x));
    case Activation::kTanh:
      return std::tanh(x);
  }
  return 0;
}

class ActivateTest : public ::testing::TestWithParam<Activation> {};

TEST_P(ActivateTest, MatchesTheFormulaWithinAFewUlp) {
  // Some ten roundings and a polynomial each. An error of the exponent's argument is one of the
  // result times the argument: x²/2 for gelu_erf, 2u (four roundings) for gelu_tanh, x for the
  // others. Results below 2⁻¹²⁶ may be 0.
  for (const float range : {0.01f, 1.0f, 5.0f, 30.0f}) {
    const auto x = Random(100003, -range, range, 7);
    std::vector<float> y(x.size() + 1, -77);
    ASSERT_TRUE(
        Activate(Backwards(), {GetParam(), x.data(), y.data(), static_cast<int64_t>(x.size())})
            .ok());
    EXPECT_EQ(y.back(), -77);
    for (size_t i = 0; i < x.size(); ++i) {
      const double expected = Expected(GetParam(), x[i]);
      const double size = std::abs(x[i]);
      const double tail = GetParam() == Activation::kGeluErf ? size * size / 2
                          : GetParam() == Activation::kGeluTanh
                              ? 6.4 * size * (1 + size * size / 22)
                              : size / 2;
      const double tolerance =
          std::abs(expected) * (10 + tail) * 0x1p-24 + 0x1p-126 * std::max(1.0, size);
      ASSERT_NEAR(y[i], expected, tolerance) << "x = " << x[i];
    }
  }
}

TEST_P(ActivateTest, NanStaysNanAndWorksInPlace) {
  std::vector<float> x(37, 0.5f);
  x[3] = x[20] = x[36] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(Activate({}, {GetParam(), x.data(), x.data(), 37}).ok());
  for (int i = 0; i < 37; ++i) EXPECT_EQ(std::isnan(x[i]), i == 3 || i == 20 || i == 36) << i;
}

INSTANTIATE_TEST_SUITE_P(All, ActivateTest,
                         ::testing::Values(Activation::kNone, Activation::kRelu,
                                           Activation::kGeluErf, Activation::kGeluTanh,
                                           Activation::kSigmoid, Activation::kTanh),
                         [](const auto& info) { return std::string(NameOf(info.param)); });

}  // namespace
}  // namespace espalier::kernels
