#include "engine/sparse/structure.h"

#include <algorithm>
#include <array>
#include <bit>

#include "absl/strings/str_cat.h"
#include "engine/sparse/nonzero_map.h"
#include "engine/sparse/sparse_weight.h"
#include "engine/sparse/weight_elements.h"
#include "kernels/block_csr_linear/block_csr_linear.h"
#include "kernels/block_csr_linear/block_steps.h"

namespace espalier::sparse {
namespace {

// Block shapes considered, coarsest first. Squares are what pruning tools offer; 64×128 is a head
// of a transformer against a wgmma-sized panel, 16×32 the exact tile of RadiX-Net's layers (two
// mma.m16n8k16 side by side), each both ways round; 16×1 is one AVX-512 register of outputs.
struct BlockShape {
  int32_t rows, cols;
};
constexpr BlockShape kBlockShapes[] = {{128, 128}, {64, 128}, {128, 64}, {64, 64},
                                       {32, 32},   {16, 32},  {32, 16},  {16, 16},
                                       {8, 8},     {4, 4},    {16, 1}};
constexpr LayoutSpec kColumnBlock = {Layout::kBlockCsr, 16, 1};

// The rules behind WeightStructure::found. A trained dense weight has practically no exact zero, so
// a tenth of them means that somebody pruned. A structure accounts for the zeros when nearly all
// that it stores is non-zero and nearly all zeros lie outside it. Rows and columns may have died on
// top of it: then that holds among the others, and for at least half of all it stores, so that a
// few scattered values do not pass for blocks that are otherwise dead.
constexpr double kPrunedSparsity = 0.10;
constexpr double kFill = 0.95;
constexpr double kUnexplainedZeros = 0.10;
constexpr double kFillWithDeadUnits = 0.50;

// A layout with how many of its stored elements lie in W, and in live rows and columns of W.
struct Candidate {
  LayoutOption option;
  int64_t inside = 0;
  int64_t live = 0;
};

template <typename Bits>
NonzeroMap ReadWeight(const Bits* values, const FloatBits& format, bool flush,
                      WeightStructure& structure) {
  NonzeroMap map(structure.out, structure.in);
  const Bits sign = static_cast<Bits>(format.sign);
  const Bits smallest_normal = static_cast<Bits>(format.smallest_normal);
  const Bits infinity = static_cast<Bits>(format.infinity);
  const Bits smallest_nonzero = flush ? smallest_normal : 1;
  for (int64_t r = 0; r < structure.out; ++r) {
    for (int64_t w = 0; w < map.words_per_row(); ++w) {
      const int64_t n = std::min<int64_t>(64, structure.in - w * 64);
      uint64_t word = 0;
      uint32_t negative_zeros = 0, below_normal = 0, nonfinite = 0, zeros = 0;
      for (int64_t i = 0; i < n; ++i) {
        const Bits magnitude = static_cast<Bits>(values[i] & ~sign);
        negative_zeros += values[i] == sign;
        zeros += magnitude == 0;
        below_normal += magnitude < smallest_normal;
        nonfinite += magnitude >= infinity;
        word |= uint64_t{magnitude >= smallest_nonzero} << i;
      }
      values += n;
      map.row(r)[w] = word;
      structure.negative_zeros += negative_zeros;
      structure.subnormals += below_normal - zeros;
      structure.nonfinite += nonfinite;
    }
  }
  return map;
}

struct LiveCells {
  std::vector<uint8_t> rows, cols;  // 1 where the row or column has a non-zero
  int64_t count = 0;                // live rows · live columns
};

LiveCells FindLiveAndBands(const NonzeroMap& map, WeightStructure& structure) {
  LiveCells live;
  live.rows.resize(map.rows());
  live.cols.resize(map.cols());
  std::vector<uint64_t> any(map.words_per_row());
  for (int64_t r = 0; r < map.rows(); ++r) {
    int64_t first = -1, last = -1;
    for (int64_t w = 0; w < map.words_per_row(); ++w) {
      const uint64_t word = map.row(r)[w];
      if (word == 0) continue;
      any[w] |= word;
      if (first < 0) first = w * 64 + std::countr_zero(word);
      last = w * 64 + std::bit_width(word) - 1;
    }
    if (first < 0) continue;
    live.rows[r] = 1;
    structure.bandwidth_lower = std::max(structure.bandwidth_lower, r - first);
    structure.bandwidth_upper = std::max(structure.bandwidth_upper, last - r);
  }
  for (int64_t c = 0; c < map.cols(); ++c) live.cols[c] = any[c / 64] >> (c % 64) & 1;
  const int64_t rows = std::count(live.rows.begin(), live.rows.end(), 1);
  const int64_t cols = std::count(live.cols.begin(), live.cols.end(), 1);
  structure.dead_rows = map.rows() - rows;
  structure.dead_cols = map.cols() - cols;
  live.count = rows * cols;
  return live;
}

void DescribeDiagonals(const std::vector<bool>& hit, WeightStructure& structure) {
  const int64_t period = static_cast<int64_t>(hit.size());
  structure.diagonals = std::count(hit.begin(), hit.end(), true);
  if (structure.diagonals == 0) return;
  structure.diagonal_fill =
      double(structure.nonzeros) /
      (double(structure.diagonals) * double(std::min(structure.out, structure.in)));
  if (structure.diagonals == period) {
    structure.diagonal_runs = 1;
    structure.longest_run = period;
    return;
  }
  // Starting behind a gap, no run is cut in two by the end of the ring.
  const int64_t gap = std::find(hit.begin(), hit.end(), false) - hit.begin();
  int64_t run = 0;
  for (int64_t i = 1; i <= period; ++i) {
    run = hit[(gap + i) % period] ? run + 1 : 0;
    structure.diagonal_runs += run == 1;
    structure.longest_run = std::max(structure.longest_run, run);
  }
  for (int64_t b = 128; b > 1 && structure.aligned_run == 1; b /= 2) {
    bool whole = period % b == 0;
    for (int64_t o = 0; o < period && whole; ++o) whole = hit[o] == hit[o / b * b];
    if (whole) structure.aligned_run = b;
  }
}

// The largest number of set bits among aligned groups of 4, 8 and 16 bits.
std::array<int, 3> MaxPerGroup(const NonzeroMap& map) {
  std::array<int, 3> most = {0, 0, 0};
  const auto raise = [](int& most, uint64_t counts, int width) {
    for (; counts != 0; counts >>= width) {
      most = std::max(most, static_cast<int>(counts & ((1u << width) - 1)));
    }
  };
  for (int64_t r = 0; r < map.rows(); ++r) {
    for (int64_t w = 0; w < map.words_per_row(); ++w) {
      // Counts of pairs, added up to counts of fours, eights and sixteens.
      uint64_t x = map.row(r)[w];
      if (x == 0) continue;
      x -= x >> 1 & 0x5555555555555555u;
      x = (x & 0x3333333333333333u) + (x >> 2 & 0x3333333333333333u);
      if (most[0] < 4) raise(most[0], x, 4);
      x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fu;
      if (most[1] < 8) raise(most[1], x, 8);
      x = (x + (x >> 8)) & 0x00ff00ff00ff00ffu;
      if (most[2] < 16) raise(most[2], x, 16);
    }
    if (most[0] == 4 && most[1] == 8 && most[2] == 16) break;
  }
  return most;
}

void DescribeGroups(const NonzeroMap& map, WeightStructure& structure) {
  const std::array<int, 3> most = MaxPerGroup(map);
  structure.two_of_four = most[0] <= 2;
  if (structure.nonzeros == 0) return;
  for (int i = 0; i < 3; ++i) {
    const int n = most[i], m = 4 << i;
    if (m > structure.in) break;  // no group is whole: any pattern would pass for a sparse one
    // n / m < best, in integers.
    const bool better =
        structure.n_of_m_m == 0 ? n < m : n * structure.n_of_m_m < structure.n_of_m_n * m;
    if (better) structure.n_of_m_n = n, structure.n_of_m_m = m;
  }
}

// Sums of `flags` over consecutive blocks of `side`.
std::vector<int32_t> BlockSums(const std::vector<uint8_t>& flags, int32_t side) {
  std::vector<int32_t> sums((flags.size() + side - 1) / side);
  for (size_t i = 0; i < flags.size(); ++i) sums[i / side] += flags[i];
  return sums;
}

// Elements of W that the blocks of `spec` cover, weighted by row and column flags.
int64_t CoveredCells(const LayoutSpec& spec, const NonzeroMap& blocks, const std::vector<bool>& hit,
                     const std::vector<uint8_t>& row_flags, const std::vector<uint8_t>& col_flags) {
  const auto rows = BlockSums(row_flags, spec.block_rows);
  const auto cols = BlockSums(col_flags, spec.block_cols);
  int64_t cells = 0;
  if (spec.layout == Layout::kBlockCsr) {
    blocks.ForEach([&](int64_t I, int64_t J) { cells += int64_t{rows[I]} * cols[J]; });
    return cells;
  }
  const int64_t R = blocks.rows(), C = blocks.cols();
  for (int64_t o = 0; o < static_cast<int64_t>(hit.size()); ++o) {
    if (!hit[o]) continue;
    for (int64_t t = 0; t < std::min(R, C); ++t) {
      const auto [I, J] = kernels::DiagonalBlock(R, C, o, t);
      cells += int64_t{rows[I]} * cols[J];
    }
  }
  return cells;
}

// What a CPU holds of such blocks.
size_t BlockBytes(const WeightStructure& s, const LayoutSpec& spec, const NonzeroMap& blocks) {
  const int64_t count = blocks.Count();
  const size_t bytes = LayoutBytes(spec, s.dtype, s.out, s.in, count);
  if (!kernels::BlockCsrLinearCpu::PacksColumns(
          {spec.layout, s.dtype, s.out, s.in, spec.block_rows, spec.block_cols})) {
    return bytes;
  }
  kernels::BlockStepsSize steps(blocks.rows());
  blocks.ForEach([&](int64_t row, int64_t col) { steps.Block(row, col); });
  return bytes - count * sizeof(uint16_t) + steps.bytes();
}

Candidate MakeCandidate(const WeightStructure& structure, const LayoutSpec& spec,
                        const NonzeroMap& blocks, const std::vector<bool>& hit,
                        const LiveCells& live) {
  const bool diagonal = spec.layout == Layout::kDiagonal;
  const int64_t length = diagonal ? std::min(blocks.rows(), blocks.cols()) : 1;
  Candidate candidate;
  LayoutOption& option = candidate.option;
  option.spec = spec;
  option.count = diagonal ? std::count(hit.begin(), hit.end(), true) : blocks.Count();
  option.stored = option.count * length * spec.block_rows * spec.block_cols;
  option.bytes = diagonal
                     ? LayoutBytes(spec, structure.dtype, structure.out, structure.in, option.count)
                     : BlockBytes(structure, spec, blocks);
  if (option.count * length == blocks.rows() * blocks.cols()) {
    candidate.inside = structure.out * structure.in;
    candidate.live = live.count;
  } else {
    const std::vector<uint8_t> all_rows(structure.out, 1), all_cols(structure.in, 1);
    candidate.inside = CoveredCells(spec, blocks, hit, all_rows, all_cols);
    candidate.live = CoveredCells(spec, blocks, hit, live.rows, live.cols);
  }
  option.fill = candidate.inside == 0 ? 1.0 : double(structure.nonzeros) / double(candidate.inside);
  return candidate;
}

// Every diagonal and block layout, in the order in which a name is looked for: diagonals before
// blocks (no index per value), coarse before fine.
std::vector<Candidate> MakeCandidates(const WeightStructure& structure, const NonzeroMap& map,
                                      const std::vector<bool>& element_hit, const LiveCells& live) {
  std::vector<Candidate> candidates, blocks;
  for (const auto& [br, bc] : kBlockShapes) {
    const NonzeroMap coarse = map.Coarsen(br, bc);
    blocks.push_back(MakeCandidate(structure, {Layout::kBlockCsr, br, bc}, coarse, {}, live));
    if (br != bc) continue;
    candidates.push_back(
        MakeCandidate(structure, {Layout::kDiagonal, br, bc}, coarse, coarse.Diagonals(), live));
  }
  candidates.insert(candidates.end(), blocks.begin(), blocks.end());
  candidates.push_back(MakeCandidate(structure, {Layout::kDiagonal, 1, 1}, map, element_hit, live));
  return candidates;
}

// Cells of W with −lower <= col − row <= upper.
int64_t BandCells(const WeightStructure& s) {
  int64_t cells = 0;
  for (int64_t r = 0; r < s.out; ++r) {
    const int64_t first = std::max<int64_t>(0, r - s.bandwidth_lower);
    const int64_t last = std::min(s.in - 1, r + s.bandwidth_upper);
    cells += std::max<int64_t>(0, last - first + 1);
  }
  return cells;
}

std::string NameStructure(const WeightStructure& s, const std::vector<Candidate>& candidates,
                          const LayoutOption& csr, int64_t live_cells) {
  if (s.nonzeros == 0) return "zero";
  if (s.sparsity() < kPrunedSparsity) return "dense";

  const double nonzeros = static_cast<double>(s.nonzeros);
  // `cells` out of `all`, dead rows and columns counted in both or in neither.
  const auto accounts_for_zeros = [&](int64_t cells, int64_t all) {
    return nonzeros >= kFill * cells && cells - nonzeros <= kUnexplainedZeros * (all - nonzeros);
  };
  const int64_t all_cells = s.out * s.in;
  const auto name_first_where = [&](auto&& holds) -> std::string {
    for (const Candidate& candidate : candidates) {
      const LayoutSpec& spec = candidate.option.spec;
      // A diagonal of one block is just a block: any set of blocks is a set of such diagonals.
      const bool one_block = s.out <= spec.block_rows || s.in <= spec.block_cols;
      if (spec.layout == Layout::kDiagonal && one_block) continue;
      // Padding can make a shape that fits the zeros cost more than no shape at all.
      if (candidate.option.bytes <= csr.bytes && holds(candidate)) return ToString(spec);
    }
    return "";
  };
  const auto accounts_alone = [&](const Candidate& candidate) {
    return accounts_for_zeros(candidate.inside, all_cells);
  };
  // Dead columns also look like blocks of one column, and are the plainer explanation.
  std::string name = name_first_where([&](const Candidate& candidate) {
    return candidate.option.spec != kColumnBlock && accounts_alone(candidate);
  });
  if (!name.empty()) return name;
  if (nonzeros >= kFill * live_cells) return "dead units";
  name = name_first_where([&](const Candidate& candidate) {
    return accounts_alone(candidate) || (nonzeros >= kFillWithDeadUnits * candidate.inside &&
                                         accounts_for_zeros(candidate.live, live_cells));
  });
  if (!name.empty()) return name;
  if (const int64_t band = BandCells(s); accounts_for_zeros(band, all_cells)) {
    return absl::StrCat("band(", -s.bandwidth_lower, "..", s.bandwidth_upper, ")");
  }
  const double live_elements = double(s.out - s.dead_rows) * double(s.in);
  if (s.n_of_m_m != 0 && nonzeros * s.n_of_m_m >= kFill * live_elements * s.n_of_m_n) {
    return absl::StrCat(s.n_of_m_n, ":", s.n_of_m_m);
  }
  return "scattered";
}

}  // namespace

absl::StatusOr<WeightStructure> AnalyzeStructure(const TensorView& dense,
                                                 const StructureOptions& options) {
  if (auto status = ValidateWeight(dense); !status.ok()) return status;
  WeightStructure s;
  s.out = dense.shape[0];
  s.in = dense.shape[1];
  s.dtype = dense.dtype;
  const NonzeroMap map = WithBitsType(s.dtype, [&](auto tag) {
    using Bits = decltype(tag);
    return ReadWeight(dense.As<Bits>(), FloatBitsOf(s.dtype), options.flush_subnormals, s);
  });
  s.nonzeros = map.Count();
  const LiveCells live = FindLiveAndBands(map, s);
  const std::vector<bool> diagonals = map.Diagonals();
  DescribeDiagonals(diagonals, s);
  DescribeGroups(map, s);

  const std::vector<Candidate> candidates = MakeCandidates(s, map, diagonals, live);
  const auto whole = [&](Layout layout, int64_t count, double fill) {
    const LayoutSpec spec = {layout, 1, 1};
    return LayoutOption{spec, count, count, LayoutBytes(spec, s.dtype, s.out, s.in, count), fill};
  };
  const LayoutOption csr = whole(Layout::kCsr, s.nonzeros, 1.0);
  s.found = NameStructure(s, candidates, csr, live.count);

  s.layouts.push_back(
      whole(Layout::kDense, s.out * s.in, double(s.nonzeros) / double(s.out * s.in)));
  for (const Candidate& candidate : candidates) s.layouts.push_back(candidate.option);
  s.layouts.push_back(csr);
  // Stable: at equal size the simpler layout comes first.
  std::stable_sort(s.layouts.begin(), s.layouts.end(),
                   [](const LayoutOption& a, const LayoutOption& b) { return a.bytes < b.bytes; });
  return s;
}

std::optional<size_t> BytesInLayout(const WeightStructure& structure, const LayoutSpec& spec) {
  for (const LayoutOption& option : structure.layouts) {
    if (option.spec == spec) return option.bytes;
  }
  return std::nullopt;
}

int64_t FlushSubnormals(Tensor& weight) {
  if (weight.dtype() != DType::kFloat32 && weight.dtype() != DType::kBFloat16 &&
      weight.dtype() != DType::kFloat16) {
    return 0;
  }
  return WithBitsType(weight.dtype(), [&](auto tag) {
    using Bits = decltype(tag);
    const FloatBits format = FloatBitsOf(weight.dtype());
    const Bits sign = static_cast<Bits>(format.sign);
    Bits* values = weight.As<Bits>();
    int64_t flushed = 0;
    for (int64_t i = 0; i < weight.elements(); ++i) {
      const Bits magnitude = static_cast<Bits>(values[i] & ~sign);
      if (magnitude == 0 || magnitude >= format.smallest_normal) continue;
      values[i] &= sign;
      ++flushed;
    }
    return flushed;
  });
}

}  // namespace espalier::sparse
