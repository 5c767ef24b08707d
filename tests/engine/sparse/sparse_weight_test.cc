#include "engine/sparse/sparse_weight.h"

#include <algorithm>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/sparse/weight_patterns.h"

namespace espalier::sparse {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

std::vector<LayoutSpec> SomeSpecs(Random& random) {
  const auto side = [&] { return static_cast<int32_t>(1 + random() % 24); };
  const int32_t square = side();
  return {{Layout::kDense, 1, 1},
          {Layout::kCsr, 1, 1},
          {Layout::kBlockCsr, 1, 1},
          {Layout::kBlockCsr, square, square},
          {Layout::kBlockCsr, side(), side()},
          {Layout::kDiagonal, 1, 1},
          {Layout::kDiagonal, square, square},
          {Layout::kDiagonal, side(), side()}};
}

Tensor TransposedByHand(const Tensor& weight) {
  const int64_t out = weight.shape()[0], in = weight.shape()[1];
  Tensor result = *Tensor::Allocate(weight.dtype(), {in, out});
  for (int64_t r = 0; r < out; ++r) {
    for (int64_t c = 0; c < in; ++c) SetBits(result, c, r, GetBits(weight, r, c));
  }
  return result;
}

// Index arrays as weight_view.h promises them, and every stored block or diagonal there for a
// reason.
void CheckInvariants(const SparseWeight& weight, const Tensor& dense) {
  const kernels::WeightView view = weight.view();
  const int64_t R = view.block_row_count(), C = view.block_col_count();
  EXPECT_EQ(weight.bytes(), LayoutBytes(weight.spec(), view.dtype, view.out, view.in, view.count));
  const auto block_has_nonzero = [&](int64_t I, int64_t J) {
    for (int64_t r = I * view.block_rows;
         r < std::min<int64_t>((I + 1) * view.block_rows, view.out); ++r) {
      for (int64_t c = J * view.block_cols;
           c < std::min<int64_t>((J + 1) * view.block_cols, view.in); ++c) {
        if (GetBits(dense, r, c) << (32 - 8 * SizeOf(view.dtype)) << 1 != 0) return true;
      }
    }
    return false;
  };
  if (view.layout == Layout::kCsr || view.layout == Layout::kBlockCsr) {
    ASSERT_EQ(view.row_ptr[0], 0);
    ASSERT_EQ(view.row_ptr[R], view.count);
    for (int64_t I = 0; I < R; ++I) {
      for (int64_t slot = view.row_ptr[I]; slot < view.row_ptr[I + 1]; ++slot) {
        ASSERT_GE(view.Column(slot), 0);
        ASSERT_LT(view.Column(slot), C);
        if (slot > view.row_ptr[I]) {
          ASSERT_LT(view.Column(slot - 1), view.Column(slot));
        }
        EXPECT_TRUE(block_has_nonzero(I, view.Column(slot)));
      }
    }
  }
  if (view.layout == Layout::kDiagonal) {
    for (int64_t k = 0; k < view.count; ++k) {
      ASSERT_GE(view.offsets[k], 0);
      ASSERT_LT(view.offsets[k], std::max(R, C));
      if (k > 0) {
        ASSERT_LT(view.offsets[k - 1], view.offsets[k]);
      }
      bool any = false;
      for (int64_t t = 0; t < view.diagonal_length(); ++t) {
        const auto [I, J] = kernels::DiagonalBlock(R, C, view.offsets[k], t);
        any = any || block_has_nonzero(I, J);
      }
      EXPECT_TRUE(any) << "offset " << view.offsets[k];
    }
  }
}

// Compares the stored values of two weights of the same layout.
bool SameStorage(const SparseWeight& a, const SparseWeight& b) {
  const kernels::WeightView va = a.view(), vb = b.view();
  if (!(a.spec() == b.spec()) || a.out() != b.out() || a.in() != b.in() || a.count() != b.count() ||
      a.bytes() != b.bytes()) {
    return false;
  }
  const size_t index_bytes = 4 * ((va.row_ptr ? va.block_row_count() + 1 : 0) +
                                  (va.col_idx || va.offsets ? va.count : 0)) +
                             2 * (va.col_idx16 ? va.count : 0);
  if (va.row_ptr && !std::equal(va.row_ptr, va.row_ptr + va.block_row_count() + 1, vb.row_ptr))
    return false;
  if (va.col_idx && !std::equal(va.col_idx, va.col_idx + va.count, vb.col_idx)) return false;
  if (va.col_idx16 && !std::equal(va.col_idx16, va.col_idx16 + va.count, vb.col_idx16))
    return false;
  if (va.offsets && !std::equal(va.offsets, va.offsets + va.count, vb.offsets)) return false;
  const size_t value_bytes = a.bytes() - index_bytes;
  return value_bytes == 0 || std::memcmp(va.values, vb.values, value_bytes) == 0;
}

TEST(SparseWeightTest, EveryLayoutConvertsAndTransposesExactlyForRandomShapes) {
  Random random(20250601);
  for (int round = 0; round < 150; ++round) {
    const int64_t out = 1 + random() % 70, in = round % 5 == 0 ? out : 1 + random() % 70;
    const double density = std::array{0.0, 0.02, 0.2, 0.9, 1.0}[random() % 5];
    const DType dtype = kDTypes[random() % 3];
    const Tensor dense = ScatteredWeight(random, out, in, density, dtype);
    const Tensor transposed = TransposedByHand(dense);
    for (const LayoutSpec& spec : SomeSpecs(random)) {
      SCOPED_TRACE(testing::Message() << "round " << round << ": [" << out << ", " << in << "] "
                                      << NameOf(dtype) << " " << ToString(spec));
      auto weight = SparseWeight::FromDense(dense.view(), spec);
      ASSERT_TRUE(weight.ok()) << weight.status();
      CheckInvariants(*weight, dense);
      EXPECT_TRUE(SameBytes(*weight->ToDense(), dense));
      auto turned = weight->Transposed();
      ASSERT_TRUE(turned.ok()) << turned.status();
      EXPECT_EQ(turned->spec(), (LayoutSpec{spec.layout, spec.block_cols, spec.block_rows}));
      CheckInvariants(*turned, transposed);
      EXPECT_TRUE(SameBytes(*turned->ToDense(), transposed));
      EXPECT_TRUE(
          SameStorage(*turned, *SparseWeight::FromDense(transposed.view(), turned->spec())));
      EXPECT_TRUE(SameStorage(*turned->Transposed(), *weight));
    }
  }
}

TEST(SparseWeightTest, EveryBitPatternSurvives) {
  for (const DType dtype : kDTypes) {
    // All 65,536 half patterns; for f32 the landmarks with every low half.
    Tensor dense = *Tensor::Allocate(dtype, {256, 256});
    Random random(7);
    for (int64_t i = 0; i < 65536; ++i) {
      uint32_t bits = static_cast<uint32_t>(i);
      if (dtype == DType::kFloat32) {
        constexpr uint32_t kHigh[] = {0x0000, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0x0080, 0x3f80};
        bits |= kHigh[random() % 7] << 16;
      }
      SetBits(dense, i / 256, i % 256, bits);
    }
    for (const LayoutSpec spec : {LayoutSpec{Layout::kDense, 1, 1},
                                  {Layout::kCsr, 1, 1},
                                  {Layout::kBlockCsr, 7, 3},
                                  {Layout::kDiagonal, 1, 1},
                                  {Layout::kDiagonal, 16, 16}}) {
      SCOPED_TRACE(ToString(spec));
      const Tensor back = *SparseWeight::FromDense(dense.view(), spec)->ToDense();
      for (int64_t i = 0; i < 65536; ++i) {
        const uint32_t bits = GetBits(dense, i / 256, i % 256);
        const bool zero = bits << (32 - 8 * SizeOf(dtype)) << 1 == 0;
        // Only csr drops a single zero; all others store it in a block and keep its sign.
        const uint32_t expected = zero && spec.layout == Layout::kCsr ? 0 : bits;
        ASSERT_EQ(GetBits(back, i / 256, i % 256), expected) << i;
      }
    }
  }
}

TEST(SparseWeightTest, ADroppedNegativeZeroReadsBackAsZero) {
  Tensor dense = *Tensor::Allocate(DType::kFloat32, {2, 2});
  for (int64_t i = 0; i < 4; ++i) SetBits(dense, i / 2, i % 2, 0x80000000u);
  for (const LayoutSpec spec :
       {LayoutSpec{Layout::kCsr, 1, 1}, {Layout::kBlockCsr, 2, 2}, {Layout::kDiagonal, 1, 1}}) {
    auto weight = SparseWeight::FromDense(dense.view(), spec);
    EXPECT_EQ(weight->count(), 0);
    EXPECT_EQ(GetBits(*weight->ToDense(), 1, 1), 0u);
  }
}

TEST(SparseWeightTest, PaddingOfEdgeBlocksIsZero) {
  Random random(3);
  const Tensor dense = ScatteredWeight(random, 5, 7, 1.0);
  for (const Layout layout : {Layout::kBlockCsr, Layout::kDiagonal}) {
    auto weight = SparseWeight::FromDense(dense.view(), {layout, 4, 4});
    ASSERT_EQ(weight->bytes(), weight->view().layout == Layout::kBlockCsr ? 4 * 64 + 4 * 3 + 2 * 4
                                                                          : 2 * 2 * 64 + 4 * 2u);
    const float* values = static_cast<const float*>(weight->view().values);
    EXPECT_EQ(std::count(values, values + 64, 0.0f), 64 - 35);
    // The last block of the 2×2 grid holds one row of three values.
    const int64_t last = layout == Layout::kBlockCsr ? 3 : 1;
    const float* corner = values + last * 16;
    EXPECT_EQ(std::count(corner, corner + 3, 0.0f), 0);
    EXPECT_EQ(std::count(corner + 3, corner + 16, 0.0f), 13);
  }
}

TEST(SparseWeightTest, DiagonalsFollowTheIndexMapInBothOrientations) {
  // Tall: row = (t + o) mod 3, col = t. Offset 1 visits (1, 0), (2, 1).
  Tensor tall = *Tensor::Allocate(DType::kFloat32, {3, 2});
  std::fill_n(tall.As<float>(), 6, 0.0f);
  tall.As<float>()[1 * 2 + 0] = 10;
  tall.As<float>()[2 * 2 + 1] = 21;
  auto weight = SparseWeight::FromDense(tall.view(), {Layout::kDiagonal, 1, 1});
  ASSERT_EQ(weight->count(), 1);
  EXPECT_EQ(weight->view().offsets[0], 1);
  EXPECT_EQ(static_cast<const float*>(weight->view().values)[0], 10);
  EXPECT_EQ(static_cast<const float*>(weight->view().values)[1], 21);
  // Wide: row = t, col = (t + o) mod 3: the same offset and the same order.
  auto wide = weight->Transposed();
  ASSERT_EQ(wide->count(), 1);
  EXPECT_EQ(wide->view().offsets[0], 1);
  EXPECT_EQ(static_cast<const float*>(wide->view().values)[1], 21);

  // Square 4×4, offset 1 visits (1, 0), (2, 1), (3, 2), (0, 3); transposed it is offset 3.
  Random random(4);
  Tensor square = DiagonalWeight(random, 4, 4, 1, {0, 1});
  auto turned = SparseWeight::FromDense(square.view(), {Layout::kDiagonal, 1, 1})->Transposed();
  ASSERT_EQ(turned->count(), 2);
  EXPECT_EQ(turned->view().offsets[0], 0);
  EXPECT_EQ(turned->view().offsets[1], 3);
}

TEST(SparseWeightTest, ResidentBytesMeetTheBarAt4096) {
  constexpr int64_t n = 4096;
  Random random(11);
  const double dense_bytes = double(n) * n * 4;
  const auto share = [&](const Tensor& dense, const LayoutSpec& spec) {
    int64_t nonzeros = 0;
    for (int64_t i = 0; i < n * n; ++i) nonzeros += dense.As<float>()[i] != 0;
    auto weight = SparseWeight::FromDense(dense.view(), spec);
    return weight->bytes() / (dense_bytes * nonzeros / (double(n) * n));
  };
  EXPECT_LE(share(DiagonalWeight(random, n, n, 1, RandomOffsets(random, 410, n)),
                  {Layout::kDiagonal, 1, 1}),
            1.05);
  EXPECT_LE(share(DiagonalWeight(random, n, n, 16, RandomOffsets(random, 26, n / 16)),
                  {Layout::kDiagonal, 16, 16}),
            1.05);
  for (const int32_t block : {4, 8, 16}) {
    EXPECT_LE(
        share(BlockWeight(random, n, n, block, block, 0.1), {Layout::kBlockCsr, block, block}),
        1.05)
        << block;
  }
  EXPECT_LE(share(ScatteredWeight(random, n, n, 0.1), {Layout::kCsr, 1, 1}), 2.1);
}

TEST(SparseWeightTest, BlockColumnsTakeSixteenBitsWhereTheyFit) {
  Random random(12);
  for (const int64_t columns : {int64_t{1} << 16, (int64_t{1} << 16) + 1}) {
    Tensor dense = ScatteredWeight(random, 2, columns, 0.01);
    dense.As<float>()[columns - 1] = 1;  // the last column is stored
    auto weight = SparseWeight::FromDense(dense.view(), {Layout::kBlockCsr, 2, 1});
    ASSERT_TRUE(weight.ok()) << weight.status();
    const kernels::WeightView view = weight->view();
    const bool narrow = columns <= 1 << 16;
    EXPECT_EQ(view.col_idx16 != nullptr, narrow);
    EXPECT_EQ(view.col_idx == nullptr, narrow);
    EXPECT_EQ(view.Column(view.count - 1), columns - 1);
    CheckInvariants(*weight, dense);
    EXPECT_TRUE(SameBytes(*weight->ToDense(), dense));
    EXPECT_TRUE(SameBytes(*weight->Transposed()->Transposed()->ToDense(), dense));
  }
}

TEST(SparseWeightTest, RefusesWhatIsNoWeight) {
  const auto code = [](DType dtype, Shape shape, LayoutSpec spec) {
    const float data[64] = {};
    return SparseWeight::FromDense({dtype, shape, data}, spec).status().code();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code(DType::kFloat32, {8}, {}), kInvalid);
  EXPECT_EQ(code(DType::kFloat32, {2, 2, 2}, {}), kInvalid);
  EXPECT_EQ(code(DType::kFloat32, {0, 8}, {}), kInvalid);
  EXPECT_EQ(code(DType::kFloat32, {8, 0}, {}), kInvalid);
  EXPECT_EQ(code(DType::kFloat64, {4, 4}, {}), kInvalid);
  EXPECT_EQ(code(DType::kInt8, {4, 4}, {}), kInvalid);
  EXPECT_EQ(code(DType::kFloat32, {4, 4}, {Layout::kBlockCsr, 0, 1}), kInvalid);
  EXPECT_EQ(code(DType::kFloat32, {4, 4}, {Layout::kDiagonal, 1, 4097}), kInvalid);
  EXPECT_EQ(code(DType::kFloat32, {4, 4}, {Layout::kDiagonal, 1, 4096}), absl::StatusCode::kOk);
}

TEST(SparseWeightTest, ReleasedValuesAreGoneFromBytesAndViewButIndicesStay) {
  Random random(5);
  const Tensor dense = ScatteredWeight(random, 32, 32, 0.2);
  auto weight = SparseWeight::FromDense(dense.view(), {Layout::kCsr, 1, 1});
  const int64_t count = weight->count();
  weight->ReleaseValues();
  EXPECT_EQ(weight->view().values, nullptr);
  EXPECT_EQ(weight->bytes(), 4u * (33 + count));
  EXPECT_EQ(weight->ToDense().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(weight->Transposed().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(SparseWeightTest, AWeightOfZerosHoldsNoValuesAndIsNotTakenForReleased) {
  Random random(5);
  const Tensor dense = ScatteredWeight(random, 20, 30, 0);
  auto diagonal = SparseWeight::FromDense(dense.view(), {Layout::kDiagonal, 16, 16});
  EXPECT_EQ(diagonal->bytes(), 0u);
  EXPECT_TRUE(SameBytes(*diagonal->ToDense(), dense));
  EXPECT_EQ(diagonal->Transposed()->out(), 30);
}

}  // namespace
}  // namespace espalier::sparse
