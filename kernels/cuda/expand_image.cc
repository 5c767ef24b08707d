#include "kernels/cuda/expand_image.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <vector>

#include "kernels/cuda/block_image.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kBanks = 32;  // of shared memory, 4 bytes wide; as many as a warp has lanes

// visit(row, column, index into values) for every stored value.
template <typename Visit>
void ForEachValue(const WeightView& w, Visit visit) {
  if (w.layout == Layout::kCsr) {
    for (int64_t row = 0; row < w.out; ++row) {
      for (int32_t i = w.row_ptr[row]; i < w.row_ptr[row + 1]; ++i) visit(row, w.col_idx[i], i);
    }
    return;
  }
  const int64_t length = w.diagonal_length();
  for (int64_t k = 0; k < w.count; ++k) {
    for (int64_t t = 0; t < length; ++t) {
      const BlockPosition at = DiagonalBlock(w.out, w.in, w.offsets[k], t);
      visit(at.row, at.col, k * length + t);
    }
  }
}

std::vector<int32_t> CountByTile(const WeightView& w, const ExpandImage& image) {
  std::vector<int32_t> counts(image.row_tiles * image.column_tiles);
  ForEachValue(w, [&](int64_t row, int64_t column, int64_t) {
    ++counts[row / kExpandSide * image.column_tiles + column / kExpandSide];
  });
  return counts;
}

int32_t QuadsFor(int32_t entries) { return (entries + kQuadEntries - 1) / kQuadEntries; }

// Entries of one tile into its quads.
void DealByBank(std::span<const uint32_t> entries, uint32_t* quads) {
  std::array<std::vector<uint32_t>, kBanks> by_bank;
  for (uint32_t entry : entries) by_bank[(entry >> 16) / 4 % kBanks].push_back(entry);
  std::array<int, kBanks> order;
  std::iota(order.begin(), order.end(), 0);
  const auto count = static_cast<int64_t>(entries.size());
  for (int64_t first = 0; first < count; first += kBanks * kQuadEntries) {
    for (int j = 0; j < kQuadEntries; ++j) {
      std::stable_sort(order.begin(), order.end(),
                       [&](int a, int b) { return by_bank[a].size() > by_bank[b].size(); });
      size_t bank = 0;
      for (int lane = 0; lane < kBanks; ++lane) {
        const int64_t slot = first + lane * kQuadEntries + j;
        if (slot >= count) break;
        if (bank == order.size() || by_bank[order[bank]].empty()) bank = 0;
        quads[slot] = by_bank[order[bank]].back();
        by_bank[order[bank++]].pop_back();
        // The fullest bank comes first, so it is empty only when all are: a slot always finds an entry.
      }
    }
  }
  const int64_t slots = int64_t{QuadsFor(static_cast<int32_t>(count))} * kQuadEntries;
  for (int64_t slot = count; slot < slots; ++slot) quads[slot] = quads[count - 1];
}

void Pack(const WeightView& w, const ExpandImage& image, char* base) {
  const std::vector<int32_t> counts = CountByTile(w, image);
  auto* tiles = reinterpret_cast<int32_t*>(base);
  auto* quads = reinterpret_cast<uint32_t*>(base + image.quads_offset);
  const auto* values = static_cast<const uint16_t*>(w.values);
  std::vector<int64_t> begins(counts.size() + 1, 0), next;
  tiles[0] = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    begins[i + 1] = begins[i] + counts[i];
    tiles[i + 1] = tiles[i] + QuadsFor(counts[i]);
  }
  std::vector<uint32_t> entries(begins.back());
  next = begins;
  const int mask = SwizzleMask(kExpandSide);
  ForEachValue(w, [&](int64_t row, int64_t column, int64_t index) {
    const int64_t tile = row / kExpandSide * image.column_tiles + column / kExpandSide;
    const int linear =
        static_cast<int>(2 * (row % kExpandSide * kExpandSide + column % kExpandSide));
    entries[next[tile]++] = static_cast<uint32_t>(Swizzled(linear, mask)) << 16 | values[index];
  });
  for (size_t i = 0; i < counts.size(); ++i) {
    DealByBank({entries.data() + begins[i], static_cast<size_t>(counts[i])},
               quads + int64_t{tiles[i]} * kQuadEntries);
  }
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

ExpandImage ExpandImageOf(const WeightView& weight) {
  ExpandImage image;
  image.row_tiles = CeilDiv(weight.out, kExpandSide);
  image.column_tiles = CeilDiv(weight.in, kExpandSide);
  const size_t index_bytes = (image.row_tiles * image.column_tiles + 1) * sizeof(int32_t);
  image.quads_offset = (index_bytes + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
  return image;
}

bool FitsExpandImage(const LinearDesc& desc) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max() / 4;
  const bool is_diagonal =
      desc.layout == Layout::kDiagonal && desc.block_rows == 1 && desc.block_cols == 1;
  if (desc.layout != Layout::kCsr && !is_diagonal) return false;
  if (desc.weight_dtype != DType::kBFloat16 && desc.weight_dtype != DType::kFloat16) return false;
  if (desc.io_dtype != desc.weight_dtype || desc.in < 1 || desc.out < 1) return false;
  if (desc.in > kLimit || desc.out > kLimit || desc.count < 0) return false;
  if (CeilDiv(desc.out, kExpandSide) * CeilDiv(desc.in, kExpandSide) > kLimit) return false;
  return desc.count <= (is_diagonal ? kLimit / std::min(desc.in, desc.out) : kLimit);
}

size_t ExpandImageBytes(const WeightView& weight) {
  const ExpandImage image = ExpandImageOf(weight);
  int64_t quads = 0;
  for (int32_t count : CountByTile(weight, image)) quads += QuadsFor(count);
  return image.quads_offset + quads * kQuadEntries * sizeof(uint32_t);
}

KernelStatus PackExpandImage(const WeightView& weight, void* packed) {
  if (!FitsExpandImage({0, weight.out, weight.in, weight.layout, weight.dtype, weight.dtype,
                        weight.block_rows, weight.block_cols, weight.count})) {
    return {KernelCode::kUnsupported, "expand image: needs 2-byte csr or diagonal(1)"};
  }
  const ExpandImage image = ExpandImageOf(weight);
  std::memset(packed, 0, image.quads_offset);
  try {
    Pack(weight, image, static_cast<char*>(packed));
  } catch (const std::bad_alloc&) {
    return {KernelCode::kOutOfMemory, "expand image: no host memory for the lists of entries"};
  }
  return {};
}

ExpandCut CutExpandTiles(const ExpandImage& image, int64_t tokens, int tile_tokens,
                         int most_row_tiles, const ExpandClusters& clusters) {
  // Clocks: what a tile moves through shared memory at 128 bytes a clock (expand_linear.cu); what starts and ends a thread
  // block; what the exchange of sums adds.
  const auto cost = [&](size_t log_splits, int row_tiles, int64_t token_tiles, int width) {
    const int64_t items = CeilDiv(image.row_tiles, row_tiles) * token_tiles;
    const int64_t rounds = CeilDiv(items, std::max(1, clusters.active[log_splits]));
    const int64_t steps = CeilDiv(image.column_tiles, int64_t{1} << log_splits);
    return rounds * (steps * row_tiles * (115 + width) + 3000 + (log_splits > 0 ? 1500 : 0));
  };
  constexpr int kShapeTokens = 32, kShapeRowTiles = 6;  // what `splits` is chosen for
  size_t log_splits = 0;
  int64_t best = std::numeric_limits<int64_t>::max();
  for (size_t log = 0; log < clusters.active.size() && 1 << log <= image.column_tiles; ++log) {
    for (int r = 1; r <= kShapeRowTiles; ++r) {
      const int64_t clocks = cost(log, r, 1, kShapeTokens);
      if (clocks < best) best = clocks, log_splits = log;
    }
  }
  ExpandCut cut{1 << log_splits, 1};
  best = std::numeric_limits<int64_t>::max();
  for (int r = 1; r <= most_row_tiles; ++r) {
    const int64_t clocks = cost(log_splits, r, CeilDiv(tokens, tile_tokens), tile_tokens);
    if (clocks < best) best = clocks, cut.row_tiles = r;
  }
  return cut;
}

}  // namespace espalier::kernels::cuda
