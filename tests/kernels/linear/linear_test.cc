// Every variant of LinearVariants(), on every instruction set that this machine has, against the
// oracle.
#include "kernels/linear/linear.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <sstream>

#include "hwy/targets.h"
#include "tests/kernels/linear/linear_problem.h"
#include "tests/testing/sanitized.h"

namespace espalier::kernels::testing {
namespace {

struct BlockShape {
  int32_t rows, cols;
};

std::vector<BlockShape> BlockShapes(Layout layout) {
  if (layout == Layout::kDense || layout == Layout::kCsr) return {{1, 1}};
  return {{1, 1},   {4, 4},   {16, 16}, {8, 8},     {32, 32}, {3, 5},
          {64, 64}, {16, 32}, {1, 16},  {128, 128}, {16, 1},  {48, 20}};
}

enum class Residual : uint8_t { kNone, kApart, kInY };
constexpr Residual kResiduals[] = {Residual::kNone, Residual::kApart, Residual::kInY};

const char* NameOf(Residual residual) {
  return residual == Residual::kNone    ? "no residual"
         : residual == Residual::kApart ? "residual"
                                        : "residual in y";
}

// One problem: everything but the variant. Printed when something fails.
struct Case {
  int64_t out, in, tokens;
  Pattern pattern;
  BlockShape block;
  double density;
  bool bias;
  RunOptions options;
  uint64_t seed;
  Residual residual = Residual::kNone;
};

std::string Describe(const Case& c, DType dtype) {
  std::ostringstream text;
  text << "out " << c.out << ", in " << c.in << ", tokens " << c.tokens << ", " << NameOf(c.pattern)
       << " density " << c.density << ", block " << c.block.rows << "x" << c.block.cols << ", "
       << espalier::NameOf(dtype) << (c.bias ? ", bias, " : ", no bias, ") << NameOf(c.residual)
       << ", " << NameOf(c.options.activation) << ", paddings of x " << c.options.x_padding
       << ", y " << c.options.y_padding << ", residual " << c.options.residual_padding
       << ", threads " << c.options.threads << ", seed " << c.seed;
  return text.str();
}

std::vector<float> RandomVector(int64_t n, std::mt19937_64& random) {
  std::uniform_real_distribution<float> distribution(-1.0f, 1.0f);
  std::vector<float> values(n);
  for (float& value : values) value = distribution(random);
  return values;
}

// (variant index, instruction set).
using Parameter = std::tuple<size_t, int64_t>;

std::string NameOfParameter(const ::testing::TestParamInfo<Parameter>& info) {
  return std::string(LinearVariants()[std::get<0>(info.param)].name) + "_" +
         hwy::TargetName(std::get<1>(info.param));
}

std::vector<int64_t> MachineTargets() {
  std::vector<int64_t> targets;
  for (const int64_t target : {HWY_AVX3, HWY_AVX2, HWY_SCALAR}) {
    if ((hwy::SupportedTargets() & target) != 0 || target == HWY_SCALAR) targets.push_back(target);
  }
  return targets;
}

class LinearTest : public ::testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(std::get<1>(GetParam()));
    hwy::GetChosenTarget().DeInit();
    if (!RunsHere()) GTEST_SKIP() << "this machine lacks what the variant needs";
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
  }

  const LinearVariant& variant() const { return LinearVariants()[std::get<0>(GetParam())]; }

  // The weight types that the variant takes for this shape.
  std::vector<DType> DTypesOf(int64_t out, int64_t in, BlockShape block) const {
    std::vector<DType> dtypes;
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      LinearDesc desc;
      desc.out = out;
      desc.in = in;
      desc.layout = variant().layout;
      desc.weight_dtype = dtype;
      desc.block_rows = block.rows;
      desc.block_cols = block.cols;
      if (variant().supports(desc)) dtypes.push_back(dtype);
    }
    return dtypes;
  }

  // False for a variant of a library that has no kernel for this CPU.
  bool RunsHere() const {
    for (const BlockShape block : BlockShapes(variant().layout)) {
      if (!DTypesOf(100, 100, block).empty()) return true;
    }
    return false;
  }

  // Two problems of three, without a pattern that follows those of the suites: a mixing of the seed.
  static bool IsLeftOut(const Case& c) {
    return espalier::testing::kSanitized && (c.seed * 0x9e3779b97f4a7c15u >> 32) % 3 != 0;
  }

  // False when the variant does not take the block shape.
  bool Check(const Case& c) {
    const std::vector<DType> dtypes = DTypesOf(c.out, c.in, c.block);
    if (IsLeftOut(c)) return !dtypes.empty();
    for (const DType dtype : dtypes) {
      std::mt19937_64 random(c.seed);
      const std::vector<float> dense =
          MakeDense(c.out, c.in, c.pattern, c.density, c.block.rows, c.block.cols, random);
      const OwnedWeight owned =
          EncodeWeight(dense, c.out, c.in, variant().layout, c.block.rows, c.block.cols, dtype);
      const std::vector<float> x = RandomVector(c.tokens * c.in, random),
                               bias = RandomVector(c.out, random),
                               residual = RandomVector(c.tokens * c.out, random);
      Case run = c;
      run.options.residual = c.residual == Residual::kNone ? nullptr : residual.data();
      run.options.residual_in_y = c.residual == Residual::kInY;
      CheckRun(run, owned, x, c.bias ? bias.data() : nullptr);
    }
    return !dtypes.empty();
  }

  void CheckRun(const Case& c, const OwnedWeight& owned, const std::vector<float>& x,
                const float* bias) {
    const ExactBuffer packed = PackFor(variant(), owned.view());
    std::string error;
    const std::vector<float> y = RunVariant(variant(), PackedView(variant(), owned.view(), packed),
                                            x, c.tokens, bias, c.options, &error);
    EXPECT_EQ(error, "") << Describe(c, owned.dtype);
    EXPECT_EQ(CompareWithReference(owned.view(), x, c.tokens, bias, c.options, y), "")
        << Describe(c, owned.dtype);
  }
};

constexpr int64_t kTokenCounts[] = {0, 1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 64, 65, 100, 257};
constexpr Activation kActivations[] = {Activation::kNone,    Activation::kRelu,
                                       Activation::kGeluErf, Activation::kGeluTanh,
                                       Activation::kSigmoid, Activation::kTanh};
constexpr Pattern kPatterns[] = {Pattern::kScattered, Pattern::kDiagonals, Pattern::kBlocks,
                                 Pattern::kEmptyRows, Pattern::kFull,      Pattern::kAllZero};

// Every token count with every shape; block shape, pattern, activation, strides, bias, residual and
// threads take turns, so that all pairs meet over the suite.
TEST_P(LinearTest, MatchesTheReferenceForEveryShapeAndTokenCount) {
  constexpr std::pair<int64_t, int64_t> kShapes[] = {
      {1, 1},   {1, 13},   {13, 1},   {2, 3},    {7, 5},    {16, 16},  {17, 15},
      {31, 33}, {97, 101}, {127, 64}, {64, 129}, {10, 784}, {784, 10}, {200, 200}};
  const std::vector<BlockShape> blocks = BlockShapes(variant().layout);
  uint64_t turn = 0;
  int checked = 0;
  for (const auto& [out, in] : kShapes) {
    for (const int64_t tokens : kTokenCounts) {
      if (out * in > 5000 && tokens > 100) continue;  // the oracle would take most of the time
      for (size_t b = 0; b < blocks.size(); b += 3) {
        Case c{out,
               in,
               tokens,
               kPatterns[turn % 5],
               blocks[(b + turn) % blocks.size()],
               turn % 2 == 0 ? 0.1 : 0.4,
               turn % 3 != 0,
               {},
               turn};
        c.options.activation = kActivations[turn % 6];
        c.options.x_padding = turn % 4;
        c.options.y_padding = (turn / 2) % 3;
        c.options.residual_padding = (turn / 3) % 4;
        c.residual = kResiduals[(turn / 5) % 3];
        c.options.threads = turn % 7 == 0 ? 3 : 1;
        checked += Check(c) ? 1 : 0;
        ++turn;
      }
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(checked, 50);
}

TEST_P(LinearTest, MatchesTheReferenceForEveryBlockShapeAndPattern) {
  uint64_t seed = 1000;
  int checked = 0;
  for (const BlockShape block : BlockShapes(variant().layout)) {
    for (const auto& [out, in] :
         {std::pair<int64_t, int64_t>{784, 10}, {10, 784}, {150, 150}, {96, 288}, {288, 96}}) {
      for (const Pattern pattern : kPatterns) {
        for (const int64_t tokens : {1, 3, 20}) {
          Case c{out, in, tokens, pattern, block, 0.15, true, {}, seed++};
          c.options.threads = tokens == 3 ? 3 : 1;
          c.residual = kResiduals[seed % 3];
          checked += Check(c) ? 1 : 0;
        }
      }
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(checked, 50);
}

TEST_P(LinearTest, FusesEveryActivationWithAndWithoutBiasAndResidual) {
  uint64_t seed = 2000;
  for (const BlockShape block : BlockShapes(variant().layout)) {
    for (const Activation activation : kActivations) {
      for (const Residual residual : kResiduals) {
        for (const int64_t tokens : {1, 6, 35}) {
          Case c{70, 90,     tokens,  Pattern::kScattered, block, 0.3, tokens != 6,
                 {}, seed++, residual};
          c.options.activation = activation;
          Check(c);
        }
      }
    }
  }
}

TEST_P(LinearTest, MatchesTheReferenceOnALargeLayer) {
  if (std::get<1>(GetParam()) == HWY_SCALAR) GTEST_SKIP() << "one-lane code has no size of its own";
  for (const BlockShape block : {BlockShape{1, 1}, BlockShape{16, 16}}) {
    for (const int64_t tokens : {1, 8, 70}) {
      const Pattern pattern = block.rows == 1 ? Pattern::kDiagonals : Pattern::kBlocks;
      Case c{530, 1030, tokens, pattern, block, 0.05, true, {}, 3000};
      c.options.threads = 2;
      for (const Residual residual : kResiduals) {
        c.residual = residual;
        Check(c);
        std::swap(c.out, c.in);
        Check(c);
      }
    }
  }
}

// x holds ±inf and NaN: what a row stores against them must reach y as in the oracle, and nothing
// else may.
TEST_P(LinearTest, PropagatesInfinityAndNanOnlyThroughStoredValues) {
  for (const BlockShape block : BlockShapes(variant().layout)) {
    for (const int64_t tokens : {1, 4, 33}) {
      for (const auto& [out, in] : {std::pair<int64_t, int64_t>{50, 60}, {130, 40}}) {
        for (const DType dtype : DTypesOf(out, in, block)) {
          Case c{out, in, tokens, Pattern::kDiagonals, block, 0.05, false, {}, 4000};
          std::mt19937_64 random(c.seed);
          const OwnedWeight owned =
              EncodeWeight(MakeDense(out, in, c.pattern, c.density, block.rows, block.cols, random),
                           out, in, variant().layout, block.rows, block.cols, dtype);
          std::vector<float> x = RandomVector(tokens * in, random);
          x[0] = std::numeric_limits<float>::infinity();
          x[x.size() / 2] = -std::numeric_limits<float>::infinity();
          x[x.size() - 1] = std::numeric_limits<float>::quiet_NaN();
          for (const Activation activation : kActivations) {
            c.options.activation = activation;
            CheckRun(c, owned, x, nullptr);
          }
        }
      }
    }
  }
}

// The promise behind deterministic mode.
TEST_P(LinearTest, IsBitIdenticalForEveryBatchAndThreadCountWhereItSaysSo) {
  if (!variant().batch_invariant) GTEST_SKIP() << "does not promise it";
  for (const BlockShape block : BlockShapes(variant().layout)) {
    for (const auto& [out, in] :
         {std::pair<int64_t, int64_t>{210, 190}, {130, 333}, {301, 75}, {700, 600}}) {
      for (const DType dtype : DTypesOf(out, in, block)) {
        if (out == 700 && block.rows * block.cols != 1 && block.rows * block.cols != 256) continue;
        constexpr int64_t kTokens = 37;
        std::mt19937_64 random(5000);
        const OwnedWeight owned = EncodeWeight(
            MakeDense(out, in, Pattern::kScattered, 0.2, block.rows, block.cols, random), out, in,
            variant().layout, block.rows, block.cols, dtype);
        const std::vector<float> x = RandomVector(kTokens * in, random),
                                 bias = RandomVector(out, random),
                                 residual = RandomVector(kTokens * out, random);
        WeightView weight = owned.view();
        const ExactBuffer packed = PackFor(variant(), weight);
        weight.packed = packed.as();
        RunOptions options;
        options.activation = Activation::kGeluErf;
        options.residual = residual.data();
        std::string error;
        const std::vector<float> whole =
            RunVariant(variant(), weight, x, kTokens, bias.data(), options, &error);
        ASSERT_EQ(error, "");
        for (const int64_t batch : {1, 2, 3, 4, 7, 8, 9, 16, 20, 37}) {
          options.threads = batch % 3 == 1 ? 3 : 1;
          for (int64_t first = 0; first + batch <= kTokens; first += std::max<int64_t>(batch, 5)) {
            const std::vector<float> part(x.begin() + first * in, x.begin() + (first + batch) * in);
            options.residual = residual.data() + first * out;
            options.residual_in_y = batch % 2 == 0;
            const std::vector<float> y =
                RunVariant(variant(), weight, part, batch, bias.data(), options, &error);
            ASSERT_EQ(error, "");
            ASSERT_EQ(std::memcmp(y.data(), whole.data() + first * out, y.size() * sizeof(float)),
                      0)
                << "batch " << batch << " from token " << first << ", out " << out << ", in " << in
                << ", block " << block.rows << "x" << block.cols << ", " << espalier::NameOf(dtype);
          }
        }
      }
    }
  }
}

TEST_P(LinearTest, RefusesBrokenArguments) {
  for (const BlockShape block : BlockShapes(variant().layout)) {
    const std::vector<DType> dtypes = DTypesOf(8, 8, block);
    if (dtypes.empty()) continue;
    std::mt19937_64 random(6000);
    const OwnedWeight owned =
        EncodeWeight(MakeDense(8, 8, Pattern::kFull, 1, block.rows, block.cols, random), 8, 8,
                     variant().layout, block.rows, block.cols, dtypes[0]);
    const ExactBuffer packed = PackFor(variant(), owned.view());
    std::vector<float> x(16, 1.0f), y(16), residual(16, 1.0f);
    ExactBuffer scratch(variant().scratch_bytes(DescOf(owned.view(), 2), 1));
    LinearArgs good;
    good.weight = owned.view();
    good.weight.packed = packed.as();
    good.x = x.data();
    good.y = y.data();
    good.residual = residual.data();
    good.x_stride = good.y_stride = good.residual_stride = 8;
    good.tokens = 2;
    good.scratch = scratch.as();
    ASSERT_TRUE(variant().run({}, good).ok());
    const auto code = [&](auto change) {
      LinearArgs args = good;
      change(args);
      return variant().run({}, args).code;
    };
    EXPECT_EQ(code([](LinearArgs& a) { a.x = nullptr; }), KernelCode::kInvalidArgument);
    EXPECT_EQ(code([](LinearArgs& a) { a.y = nullptr; }), KernelCode::kInvalidArgument);
    EXPECT_EQ(code([](LinearArgs& a) { a.tokens = -1; }), KernelCode::kInvalidArgument);
    EXPECT_EQ(code([](LinearArgs& a) { a.x_stride = 7; }), KernelCode::kInvalidArgument);
    EXPECT_EQ(code([](LinearArgs& a) { a.y_stride = 7; }), KernelCode::kInvalidArgument);
    EXPECT_EQ(code([](LinearArgs& a) { a.residual_stride = 7; }), KernelCode::kInvalidArgument);
    EXPECT_EQ(code([](LinearArgs& a) { a.residual = a.y, a.residual_stride = 9; }),
              KernelCode::kInvalidArgument);
    EXPECT_EQ(code([](LinearArgs& a) { a.weight.values = a.weight.packed = nullptr; }),
              KernelCode::kInvalidArgument);
    EXPECT_EQ(code([](LinearArgs& a) { a.io_dtype = DType::kBFloat16; }), KernelCode::kUnsupported);
    return;
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, LinearTest,
                         ::testing::Combine(::testing::Range<size_t>(0, LinearVariants().size()),
                                            ::testing::ValuesIn(MachineTargets())),
                         NameOfParameter);

TEST(LinearVariantsTest, NamesAreUniqueAndFound) {
  std::set<std::string> names;
  for (const LinearVariant& variant : LinearVariants()) {
    EXPECT_TRUE(names.insert(variant.name).second) << variant.name;
    EXPECT_EQ(FindLinearVariantOrNull(variant.name), &variant);
  }
  EXPECT_EQ(FindLinearVariantOrNull("no_such_kernel"), nullptr);
}

// Deterministic mode needs one variant per layout and weight type that answers for every token
// count.
TEST(LinearVariantsTest, EveryLayoutAndWeightTypeHasABatchInvariantVariant) {
  for (const Layout layout : {Layout::kDense, Layout::kCsr, Layout::kBlockCsr, Layout::kDiagonal}) {
    for (const BlockShape block : BlockShapes(layout)) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        bool found = false;
        for (const LinearVariant& variant : LinearVariants()) {
          bool all = variant.batch_invariant;
          for (const int64_t tokens : kTokenCounts) {
            LinearDesc desc;
            desc.tokens = tokens;
            desc.out = desc.in = 100;
            desc.layout = layout;
            desc.weight_dtype = dtype;
            desc.block_rows = block.rows;
            desc.block_cols = block.cols;
            all = all && variant.supports(desc);
          }
          found = found || all;
        }
        EXPECT_TRUE(found) << NameOf(layout) << " " << block.rows << "x" << block.cols << " "
                           << espalier::NameOf(dtype);
      }
    }
  }
}

TEST(LinearVariantsTest, BlocksTakeNoMoreColumnsThanSixteenBitsCount) {
  for (const LinearVariant& variant : LinearVariants()) {
    LinearDesc desc;
    desc.tokens = 1;
    desc.out = 64;
    desc.layout = variant.layout;
    desc.weight_dtype = DType::kFloat32;
    desc.block_rows = desc.block_cols = 4;
    desc.count = 1;
    desc.in = 4 << 16;
    if (variant.layout != Layout::kBlockCsr || !variant.supports(desc)) continue;
    ++desc.in;
    EXPECT_FALSE(variant.supports(desc)) << variant.name;
  }
}

TEST(LinearVariantsTest, ScratchOfManyThreadsIsEnoughForARunThatTakesFewer) {
  for (const LinearVariant& variant : LinearVariants()) {
    for (const int64_t out : {10, 512, 1000}) {
      for (const int64_t tokens : {1, 4, 100}) {
        LinearDesc desc;
        desc.tokens = tokens;
        desc.out = out;
        desc.in = 784;
        desc.layout = variant.layout;
        desc.count = 16;
        const size_t most = variant.scratch_bytes(desc, 16);
        for (int threads = 1; threads < 16; ++threads) {
          EXPECT_GE(most, variant.scratch_bytes(desc, threads))
              << variant.name << " out " << out << " tokens " << tokens << " threads " << threads;
        }
      }
    }
  }
}

}  // namespace
}  // namespace espalier::kernels::testing
