#include "engine/sparse/structure.h"

#include <algorithm>
#include <set>

#include "engine/sparse/nonzero_map.h"
#include "engine/sparse/sparse_weight.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/block_csr_linear/block_csr_linear.h"
#include "kernels/block_csr_linear/block_steps.h"
#include "tests/engine/sparse/weight_patterns.h"

namespace espalier::sparse {
namespace {

WeightStructure Analyze(const Tensor& dense, bool flush = false) {
  auto structure = AnalyzeStructure(dense.view(), {flush});
  EXPECT_TRUE(structure.ok()) << structure.status();
  return *std::move(structure);
}

std::string Found(const Tensor& dense) { return Analyze(dense).found; }

const LayoutOption& Option(const WeightStructure& s, const LayoutSpec& spec) {
  return *std::find_if(s.layouts.begin(), s.layouts.end(),
                       [&](const auto& o) { return o.spec == spec; });
}

// What serving it from a CPU holds.
size_t HeldBytes(const SparseWeight& weight) {
  const kernels::WeightView view = weight.view();
  if (!kernels::BlockCsrLinearCpu::PacksColumns(view)) return weight.bytes();
  kernels::BlockStepsSize steps(view.block_row_count());
  for (int64_t row = 0; row < view.block_row_count(); ++row) {
    for (int64_t i = view.row_ptr[row]; i < view.row_ptr[row + 1]; ++i) {
      steps.Block(row, view.Column(i));
    }
  }
  return weight.bytes() - view.count * sizeof(uint16_t) + steps.bytes();
}

// Every option against the weight really built, and its fill against a count over the dense matrix.
void CheckLayouts(const Tensor& dense, const WeightStructure& s) {
  const auto is_nonzero = [&](int64_t r, int64_t c) {
    return dense.As<float>()[r * s.in + c] != 0;
  };
  for (size_t i = 0; i < s.layouts.size(); ++i) {
    const LayoutOption& option = s.layouts[i];
    SCOPED_TRACE(ToString(option.spec));
    if (i > 0) {
      EXPECT_LE(s.layouts[i - 1].bytes, option.bytes);
    }
    auto weight = SparseWeight::FromDense(dense.view(), option.spec);
    ASSERT_TRUE(weight.ok());
    EXPECT_EQ(option.bytes, HeldBytes(*weight));
    EXPECT_EQ(option.count, weight->count());
    EXPECT_EQ(BytesInLayout(s, option.spec), option.bytes);
    // Stored elements that lie inside W: fill every stored value with ones by their coverage.
    const kernels::WeightView view = weight->view();
    int64_t inside = 0;
    for (int64_t I = 0; I < view.block_row_count(); ++I) {
      for (int64_t J = 0; J < view.block_col_count(); ++J) {
        bool stored = view.layout == Layout::kDense;
        if (view.row_ptr != nullptr) {
          for (int64_t i = view.row_ptr[I]; i < view.row_ptr[I + 1] && !stored; ++i) {
            stored = view.Column(i) == J;
          }
        }
        for (int64_t k = 0; view.offsets != nullptr && k < view.count && !stored; ++k) {
          for (int64_t t = 0; t < view.diagonal_length() && !stored; ++t) {
            const auto at = kernels::DiagonalBlock(view.block_row_count(), view.block_col_count(),
                                                   view.offsets[k], t);
            stored = at.row == I && at.col == J;
          }
        }
        if (stored) {
          inside += std::min<int64_t>(view.block_rows, s.out - I * view.block_rows) *
                    std::min<int64_t>(view.block_cols, s.in - J * view.block_cols);
        }
      }
    }
    int64_t nonzeros = 0;
    for (int64_t r = 0; r < s.out; ++r) {
      for (int64_t c = 0; c < s.in; ++c) nonzeros += is_nonzero(r, c);
    }
    EXPECT_EQ(s.nonzeros, nonzeros);
    EXPECT_DOUBLE_EQ(option.fill, inside == 0 ? 1.0 : double(nonzeros) / double(inside));
  }
  EXPECT_EQ(BytesInLayout(s, {Layout::kDense, 1, 1}), dense.bytes());
  EXPECT_EQ(BytesInLayout(s, {Layout::kBlockCsr, 5, 3}), std::nullopt);
}

TEST(StructureTest, EveryLayoutOptionIsWhatFromDenseBuilds) {
  Random random(42);
  for (int round = 0; round < 12; ++round) {
    const int64_t out = 1 + random() % 150, in = round % 4 == 0 ? out : 1 + random() % 150;
    const double density = std::array{0.0, 0.003, 0.05, 1.0}[round % 4];
    SCOPED_TRACE(testing::Message() << "[" << out << ", " << in << "] density " << density);
    const Tensor dense = ScatteredWeight(random, out, in, density);
    CheckLayouts(dense, Analyze(dense));
  }
  for (const auto& [out, in] : {std::pair{784, 512}, {512, 784}, {10, 512}, {512, 10}}) {
    SCOPED_TRACE(testing::Message() << "[" << out << ", " << in << "]");
    const Tensor dense = BlockWeight(random, out, in, 16, 16, 0.1);
    const WeightStructure s = Analyze(dense);
    for (const LayoutOption& option : s.layouts) {
      EXPECT_EQ(option.bytes, HeldBytes(*SparseWeight::FromDense(dense.view(), option.spec)))
          << ToString(option.spec);
    }
  }
}

TEST(StructureTest, HalfPrecisionHalvesTheValuesAndNotTheIndices) {
  Random random(1);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    const Tensor dense = ScatteredWeight(random, 100, 90, 0.1, dtype);
    const WeightStructure s = Analyze(dense);
    EXPECT_EQ(BytesInLayout(s, {Layout::kCsr, 1, 1}), size_t(6 * s.nonzeros + 4 * 101));
    for (const LayoutOption& option : s.layouts) {
      EXPECT_EQ(option.bytes, HeldBytes(*SparseWeight::FromDense(dense.view(), option.spec)));
    }
  }
}

// --- counts against the obvious loops
// ---------------------------------------------------------------

TEST(StructureTest, DiagonalsRunsAndBandsMatchTheObviousLoops) {
  Random random(99);
  for (int round = 0; round < 200; ++round) {
    const int64_t out = 1 + random() % 140, in = round % 3 == 0 ? out : 1 + random() % 140;
    const Tensor dense = ScatteredWeight(random, out, in, round % 2 ? 0.001 : 0.01);
    SCOPED_TRACE(testing::Message() << "round " << round << " [" << out << ", " << in << "]");
    const WeightStructure s = Analyze(dense);
    const int64_t period = std::max(out, in);
    std::set<int64_t> offsets, rows, cols;
    int64_t lower = 0, upper = 0;
    for (int64_t o = 0; o < period; ++o) {
      for (int64_t t = 0; t < std::min(out, in); ++t) {
        const auto [r, c] = kernels::DiagonalBlock(out, in, o, t);
        if (dense.As<float>()[r * in + c] == 0) continue;
        offsets.insert(o), rows.insert(r), cols.insert(c);
        lower = std::max(lower, r - c), upper = std::max(upper, c - r);
      }
    }
    EXPECT_EQ(s.diagonals, int64_t(offsets.size()));
    EXPECT_EQ(s.dead_rows, out - int64_t(rows.size()));
    EXPECT_EQ(s.dead_cols, in - int64_t(cols.size()));
    EXPECT_EQ(s.bandwidth_lower, lower);
    EXPECT_EQ(s.bandwidth_upper, upper);
    int64_t runs = 0, longest = 0;
    for (const int64_t o : offsets) {
      if (int64_t(offsets.size()) == period) {
        runs = 1, longest = period;
        break;
      }
      if (offsets.count((o + period - 1) % period)) continue;
      int64_t length = 1;
      while (offsets.count((o + length) % period)) ++length;
      ++runs, longest = std::max(longest, length);
    }
    EXPECT_EQ(s.diagonal_runs, runs);
    EXPECT_EQ(s.longest_run, longest);
  }
}

TEST(StructureTest, CoarsenedMapsMatchTheObviousLoops) {
  Random random(8);
  for (const auto& [rows, cols] : {std::pair{1, 1}, {3, 200}, {200, 3}, {129, 257}, {64, 128}}) {
    NonzeroMap map(rows, cols);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        if (Chance(random, 0.02)) map.row(r)[c / 64] |= uint64_t{1} << (c % 64);
      }
    }
    for (const auto& [br, bc] :
         {std::pair{1, 1}, {16, 1}, {1, 2}, {4, 4}, {16, 32}, {128, 64}, {2, 128}}) {
      std::set<std::pair<int64_t, int64_t>> expected, got;
      map.ForEach([&, br = br, bc = bc](int64_t r, int64_t c) {
        expected.insert({r / br, c / bc});
      });
      const NonzeroMap coarse = map.Coarsen(br, bc);
      coarse.ForEach([&](int64_t r, int64_t c) { got.insert({r, c}); });
      EXPECT_EQ(got, expected) << rows << "x" << cols << " by " << br << "x" << bc;
      EXPECT_EQ(coarse.Count(), int64_t(expected.size()));
      EXPECT_EQ(coarse.rows(), (rows + br - 1) / br);
      EXPECT_EQ(coarse.cols(), (cols + bc - 1) / bc);
    }
  }
}

TEST(StructureTest, AlignedRunsOfOffsetsAreMeasured) {
  Random random(6);
  const auto aligned = [&](std::vector<int64_t> offsets) {
    return Analyze(DiagonalWeight(random, 256, 256, 1, offsets)).aligned_run;
  };
  const auto run = [](int64_t from, int64_t to) {
    std::vector<int64_t> offsets;
    for (int64_t o = from; o < to; ++o) offsets.push_back(o);
    return offsets;
  };
  EXPECT_EQ(aligned(run(32, 48)), 16);
  EXPECT_EQ(aligned(run(128, 256)), 128);
  EXPECT_EQ(aligned(run(8, 24)), 8);
  EXPECT_EQ(aligned(run(33, 49)), 1);
  const WeightStructure wrapped = Analyze(DiagonalWeight(random, 256, 256, 1, {254, 255, 0, 1, 9}));
  EXPECT_EQ(wrapped.diagonal_runs, 2);  // 254, 255, 0, 1 are neighbours on the ring
  EXPECT_EQ(wrapped.longest_run, 4);
}

TEST(StructureTest, GroupsOfColumnsGiveTheTightestNOfM) {
  Random random(2);
  const auto groups = [&](int64_t in, int m, int n) {
    // n random survivors in each group of m columns.
    std::vector<int64_t> keep;
    return Analyze(MakeWeight(random, 32, in, [&](int64_t, int64_t c) {
      if (c % m == 0) keep = RandomOffsets(random, n, m);
      return std::find(keep.begin(), keep.end(), c % m) != keep.end();
    }));
  };
  for (const auto& [m, n] : {std::pair{4, 2}, {4, 1}, {8, 2}, {8, 5}, {16, 3}, {16, 15}}) {
    const WeightStructure s = groups(256, m, n);
    EXPECT_EQ(s.n_of_m_n, n) << n << ":" << m;
    EXPECT_EQ(s.n_of_m_m, m) << n << ":" << m;
    EXPECT_EQ(s.two_of_four, n <= 2);
    EXPECT_EQ(s.found, double(n) / m > 0.9 ? "dense" : absl::StrCat(n, ":", m));
  }
  const WeightStructure dense = groups(256, 4, 4);
  EXPECT_EQ(dense.n_of_m_m, 0);
  EXPECT_FALSE(dense.two_of_four);
  // A bound is no structure: a few scattered values also obey some N:M.
  const WeightStructure few = Analyze(ScatteredWeight(random, 300, 300, 0.002));
  EXPECT_NE(few.n_of_m_m, 0);
  EXPECT_EQ(few.found, "scattered");
  EXPECT_EQ(groups(250, 4, 2).found, "2:4");  // the last group has two columns
}

// --- names
// ------------------------------------------------------------------------------------------

TEST(StructureNameTest, AFullMatrixIsDenseAndNotAllDiagonals) {
  Random random(1);
  const WeightStructure s = Analyze(ScatteredWeight(random, 300, 200, 1.0));
  EXPECT_EQ(s.found, "dense");
  EXPECT_EQ(s.diagonals, 300);
  EXPECT_EQ(s.diagonal_fill, 1.0);
  EXPECT_EQ(s.layouts.front().spec.layout, Layout::kDense);
  EXPECT_EQ(Found(ScatteredWeight(random, 300, 200, 0.95)), "dense");
  EXPECT_EQ(Found(ScatteredWeight(random, 1, 1, 1.0)), "dense");
}

TEST(StructureNameTest, AMatrixOfZerosIsZero) {
  Random random(1);
  const WeightStructure s = Analyze(ScatteredWeight(random, 70, 30, 0));
  EXPECT_EQ(s.found, "zero");
  EXPECT_EQ(s.dead_rows, 70);
  EXPECT_EQ(s.dead_cols, 30);
  EXPECT_EQ(s.n_of_m_m, 0);
  EXPECT_EQ(s.diagonal_fill, 0);
  EXPECT_EQ(s.layouts.front().bytes, 0u);
  EXPECT_EQ(s.sparsity(), 1.0);
}

TEST(StructureNameTest, DiagonalsAreNamedInEveryOrientation) {
  Random random(13);
  for (const auto& [out, in] : {std::pair{512, 784}, {784, 512}, {512, 512}, {500, 333}}) {
    for (const int64_t b : {1, 4, 8, 16, 32}) {
      const int64_t limit = (std::max(out, in) + b - 1) / b;
      const int64_t count = std::max<int64_t>(1, limit / 10);
      SCOPED_TRACE(testing::Message() << "[" << out << ", " << in << "] b=" << b);
      const WeightStructure s =
          Analyze(DiagonalWeight(random, out, in, b, RandomOffsets(random, count, limit)));
      EXPECT_EQ(s.found, absl::StrCat("diagonal(", b, ")"));
      const LayoutOption& option = Option(s, {Layout::kDiagonal, int32_t(b), int32_t(b)});
      EXPECT_EQ(option.count, count);
      EXPECT_EQ(option.fill, 1.0);
      // Without edge blocks, whose padding a smaller block may save, it is also the smallest.
      if (out % b == 0 && in % b == 0) {
        EXPECT_EQ(s.layouts.front().spec, option.spec);
      }
    }
  }
}

TEST(StructureNameTest, TheMaskConventionOfDenseMaskedCheckpointsIsTheSameSetOfDiagonals) {
  // Mask (col − row) mod max(out, in): in tall matrices its diagonals are ours counted backwards.
  Random random(14);
  for (const auto& [out, in] : {std::pair{60, 100}, {100, 60}, {80, 80}}) {
    const int64_t period = std::max(out, in);
    const std::vector<int64_t> alive = RandomOffsets(random, period / 10, period);
    const WeightStructure s =
        Analyze(MakeWeight(random, out, in, [&, period = period](int64_t r, int64_t c) {
          return std::binary_search(alive.begin(), alive.end(), (c - r + period) % period);
        }));
    EXPECT_EQ(s.found, "diagonal(1)");
    EXPECT_EQ(s.diagonals, int64_t(alive.size()));
    EXPECT_EQ(s.diagonal_fill, 1.0);
  }
}

TEST(StructureNameTest, BlocksAreNamedFromHalfToVerySparse) {
  Random random(15);
  for (const double sparsity : {0.5, 0.7, 0.9, 0.95, 0.99}) {
    EXPECT_EQ(Found(BlockWeight(random, 1024, 1024, 16, 16, 1 - sparsity)), "block_csr(16)")
        << sparsity;
    EXPECT_EQ(Found(BlockWeight(random, 784, 512, 16, 16, 1 - sparsity)), "block_csr(16)")
        << sparsity;
    EXPECT_EQ(Found(BlockWeight(random, 512, 784, 4, 4, 1 - sparsity)), "block_csr(4)") << sparsity;
  }
  EXPECT_EQ(Found(BlockWeight(random, 1024, 1024, 16, 32, 0.1)), "block_csr(16x32)");
  EXPECT_EQ(Found(BlockWeight(random, 1024, 1024, 32, 16, 0.1)), "block_csr(32x16)");
  EXPECT_EQ(Found(BlockWeight(random, 1024, 1024, 64, 128, 0.2)), "block_csr(64x128)");
  EXPECT_EQ(Found(BlockWeight(random, 1024, 1024, 128, 128, 0.2)), "block_csr(128)");
  EXPECT_EQ(Found(BlockWeight(random, 1024, 1024, 16, 1, 0.1)), "block_csr(16x1)");
  // One block row with an edge: ten classes, pruned in blocks of 16.
  EXPECT_EQ(Found(BlockWeight(random, 10, 512, 16, 16, 0.3)), "block_csr(16)");
}

TEST(StructureNameTest, AFewZerosInsideDoNotHideTheStructure) {
  Random random(16);
  const auto with_zeros = [&](Tensor weight, double share) {
    for (int64_t i = 0; i < weight.elements(); ++i) {
      if (Chance(random, share)) weight.As<float>()[i] = 0;
    }
    return Found(weight);
  };
  EXPECT_EQ(with_zeros(BlockWeight(random, 512, 512, 16, 16, 0.1), 0.03), "block_csr(16)");
  EXPECT_EQ(with_zeros(DiagonalWeight(random, 512, 512, 1, {3, 99, 250}), 0.03), "diagonal(1)");
  EXPECT_EQ(with_zeros(DiagonalWeight(random, 512, 512, 16, {3, 9, 25}), 0.03), "diagonal(16)");
  // Blocks explain one half of the zeros, scatter the other.
  EXPECT_EQ(with_zeros(BlockWeight(random, 1024, 1024, 16, 16, 0.92), 0.045), "scattered");
  // Pruned again at random within the blocks: they no longer account for the zeros.
  EXPECT_EQ(with_zeros(BlockWeight(random, 512, 512, 16, 16, 0.1), 0.4), "scattered");
}

TEST(StructureNameTest, DeadUnitsDoNotHideTheStructureAndAreNamedAlone) {
  Random random(17);
  const auto kill_rows = [&](Tensor weight, double share) {
    for (int64_t r = 0; r < weight.shape()[0]; ++r) {
      if (Chance(random, share))
        std::fill_n(weight.As<float>() + r * weight.shape()[1], weight.shape()[1], 0.0f);
    }
    return weight;
  };
  EXPECT_EQ(Found(kill_rows(DiagonalWeight(random, 512, 512, 16, {3, 9, 25}), 0.2)),
            "diagonal(16)");
  EXPECT_EQ(Found(kill_rows(DiagonalWeight(random, 512, 784, 1, {3, 9, 25}), 0.2)), "diagonal(1)");
  EXPECT_EQ(Found(kill_rows(BlockWeight(random, 512, 512, 16, 16, 0.1), 0.2)), "block_csr(16)");
  // Beside dead neighbours a block must not pass for a larger one (bf16: small values, dear indices).
  const auto alive = [](int64_t r, int64_t c) {
    const std::pair block(r / 16, c / 16);
    return r % 5 != 0 && (block == std::pair<int64_t, int64_t>(0, 0) ||
                          block == std::pair<int64_t, int64_t>(10, 20) ||
                          block == std::pair<int64_t, int64_t>(40, 50));
  };
  EXPECT_EQ(Found(MakeWeight(random, 1024, 1024, alive, DType::kBFloat16)), "block_csr(16)");
  const WeightStructure s = Analyze(kill_rows(ScatteredWeight(random, 256, 128, 1.0), 0.4));
  EXPECT_EQ(s.found, "dead units");
  EXPECT_NEAR(s.dead_rows, 102, 30);
  // Dead columns are blocks of one column too; the plainer name wins.
  const std::vector<int64_t> dead = RandomOffsets(random, 50, 128);
  EXPECT_EQ(Found(MakeWeight(random, 256, 128,
                             [&](int64_t, int64_t c) {
                               return !std::binary_search(dead.begin(), dead.end(), c);
                             })),
            "dead units");
}

TEST(StructureNameTest, AMatrixOfOneRowOrColumnHasDeadUnitsNotDiagonals) {
  Random random(18);
  EXPECT_EQ(Found(ScatteredWeight(random, 1, 1000, 0.1)), "dead units");
  EXPECT_EQ(Found(ScatteredWeight(random, 1000, 1, 0.1)), "dead units");
  EXPECT_EQ(Found(ScatteredWeight(random, 1, 1000, 1.0)), "dense");
}

TEST(StructureNameTest, ScatteredAndPermutedWeightsAreScattered) {
  Random random(19);
  EXPECT_EQ(Found(ScatteredWeight(random, 512, 784, 0.1)), "scattered");
  EXPECT_EQ(Found(ScatteredWeight(random, 512, 784, 0.5)), "scattered");
  EXPECT_EQ(Found(ScatteredWeight(random, 512, 784, 0.01)), "scattered");
  EXPECT_EQ(Found(ScatteredWeight(random, 2000, 2000, 1e-5)), "scattered");
  const auto permuted = [&](const Tensor& weight) {
    const int64_t out = weight.shape()[0], in = weight.shape()[1];
    std::vector<int64_t> rows = RandomOffsets(random, out, out),
                         cols = RandomOffsets(random, in, in);
    std::shuffle(rows.begin(), rows.end(), random);
    std::shuffle(cols.begin(), cols.end(), random);
    Tensor result = *Tensor::Allocate(DType::kFloat32, weight.shape());
    for (int64_t r = 0; r < out; ++r) {
      for (int64_t c = 0; c < in; ++c) SetBits(result, rows[r], cols[c], GetBits(weight, r, c));
    }
    return Found(result);
  };
  EXPECT_EQ(permuted(BlockWeight(random, 512, 512, 16, 16, 0.1)), "scattered");
  EXPECT_EQ(permuted(DiagonalWeight(random, 512, 512, 1, RandomOffsets(random, 50, 512))),
            "scattered");
}

TEST(StructureNameTest, BandsAndTriangles) {
  Random random(20);
  const auto band = [&](int64_t n, int64_t lower, int64_t upper) {
    return Analyze(MakeWeight(
        random, n, n, [=](int64_t r, int64_t c) { return r - c <= lower && c - r <= upper; }));
  };
  const WeightStructure tridiagonal = band(400, 1, 1);
  EXPECT_EQ(tridiagonal.found, "diagonal(1)");  // only two wrapped corners are missing
  EXPECT_EQ(tridiagonal.diagonal_runs, 1);
  EXPECT_EQ(tridiagonal.longest_run, 3);
  const WeightStructure wide = band(64, 9, 5);
  EXPECT_EQ(wide.found, "band(-9..5)");
  EXPECT_EQ(wide.bandwidth_lower, 9);
  EXPECT_EQ(wide.bandwidth_upper, 5);
  EXPECT_EQ(band(40, 39, 0).found, "band(-39..0)");  // lower triangle
}

// --- values
// -----------------------------------------------------------------------------------------

TEST(StructureTest, SubnormalsNegativeZerosAndNonfiniteValuesAreCounted) {
  struct Case {
    DType dtype;
    uint32_t sign, largest_subnormal, infinity;
  };
  for (const Case& c : {Case{DType::kFloat32, 0x80000000u, 0x007fffff, 0x7f800000},
                        Case{DType::kBFloat16, 0x8000, 0x007f, 0x7f80},
                        Case{DType::kFloat16, 0x8000, 0x03ff, 0x7c00}}) {
    SCOPED_TRACE(NameOf(c.dtype));
    Random random(21);
    Tensor dense = MakeWeight(
        random, 5, 100, [](int64_t r, int64_t) { return r == 0; }, c.dtype);
    SetBits(dense, 1, 0, c.sign);
    SetBits(dense, 1, 99, c.sign);
    SetBits(dense, 2, 3, 1);
    SetBits(dense, 2, 64, c.largest_subnormal);
    SetBits(dense, 2, 65, c.largest_subnormal | c.sign);
    SetBits(dense, 3, 1, c.largest_subnormal + 1);  // the smallest normal
    SetBits(dense, 0, 0, c.infinity | c.sign);
    SetBits(dense, 0, 1, c.infinity);
    SetBits(dense, 0, 2, c.infinity + 1);  // NaN
    SetBits(dense, 0, 3, c.infinity - 1);  // the largest finite

    WeightStructure s = Analyze(dense);
    EXPECT_EQ(s.nonzeros, 104);
    EXPECT_EQ(s.negative_zeros, 2);
    EXPECT_EQ(s.subnormals, 3);
    EXPECT_EQ(s.nonfinite, 3);
    EXPECT_EQ(s.dead_rows, 2);

    s = Analyze(dense, /*flush=*/true);
    EXPECT_EQ(s.nonzeros, 101);
    EXPECT_EQ(s.subnormals, 3);
    EXPECT_EQ(s.dead_rows, 3);

    EXPECT_EQ(FlushSubnormals(dense), 3);
    EXPECT_EQ(FlushSubnormals(dense), 0);
    EXPECT_EQ(GetBits(dense, 2, 64), 0u);
    EXPECT_EQ(GetBits(dense, 2, 65), c.sign);
    EXPECT_EQ(GetBits(dense, 3, 1), c.largest_subnormal + 1);
    EXPECT_EQ(GetBits(dense, 0, 2), c.infinity + 1);
    EXPECT_EQ(GetBits(dense, 1, 99), c.sign);
    const WeightStructure flushed = Analyze(dense);
    EXPECT_EQ(flushed.nonzeros, s.nonzeros);
    EXPECT_EQ(flushed.negative_zeros, 3);
    EXPECT_EQ(BytesInLayout(flushed, {Layout::kCsr, 1, 1}), BytesInLayout(s, {Layout::kCsr, 1, 1}));
  }
}

TEST(StructureTest, SubnormalsHideAStructureUntilTheyAreFlushed) {
  // What weight decay leaves of pruned blocks in real files.
  Random random(22);
  Tensor dense = BlockWeight(random, 256, 256, 16, 16, 0.2);
  for (int64_t i = 0; i < dense.elements(); ++i) {
    if (dense.As<float>()[i] == 0) dense.As<float>()[i] = 1e-41f;
  }
  EXPECT_EQ(Analyze(dense).found, "dense");
  EXPECT_EQ(Analyze(dense, /*flush=*/true).found, "block_csr(16)");
}

TEST(StructureTest, FlushLeavesOtherTypesAlone) {
  Tensor integers = *Tensor::Allocate(DType::kInt32, {4});
  std::fill_n(integers.As<int32_t>(), 4, 1);  // a subnormal, were it f32
  EXPECT_EQ(FlushSubnormals(integers), 0);
  EXPECT_EQ(integers.As<int32_t>()[0], 1);
}

TEST(StructureTest, RefusesWhatIsNoWeight) {
  const float data[8] = {};
  for (const TensorView& bad :
       {TensorView{DType::kFloat32, {8}, data}, TensorView{DType::kFloat32, {0, 8}, data},
        TensorView{DType::kInt32, {2, 4}, data}}) {
    EXPECT_EQ(AnalyzeStructure(bad).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(StructureTest, OptionsForAnUnlistedShapeAreAbsent) {
  Random random(1);
  const WeightStructure s = Analyze(ScatteredWeight(random, 64, 64, 0.1));
  EXPECT_EQ(Option(s, {Layout::kDense, 1, 1}).stored, 64 * 64);
  EXPECT_EQ(BytesInLayout(s, {Layout::kDiagonal, 64, 128}), std::nullopt);
}

}  // namespace
}  // namespace espalier::sparse
