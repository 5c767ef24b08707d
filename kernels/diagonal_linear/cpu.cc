#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/diagonal_linear/cpu.cc"
#include "hwy/foreach_target.h"  // must precede highway.h: compiles this file once per instruction set
// clang-format off
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/linear/epilogue-inl.h"
#include "kernels/linear/panel-inl.h"
#include "kernels/linear/weights-inl.h"
// clang-format on
#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "kernels/diagonal_linear/diagonal_linear.h"
#include "kernels/diagonal_linear/tiling.h"

HWY_BEFORE_NAMESPACE();
namespace espalier::kernels::HWY_NAMESPACE {
namespace {  // families share namespaces, and equal names of templates would be merged silently

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));

// Accumulators that leave room for operands: 24 of 32 registers with AVX-512, 12 of 16 elsewhere.
constexpr int kAccumulators = kLanes >= 16 ? 24 : 12;

// A chunk of diagonals that goes through all rows of a tile: its columns of x, its values and the
// tile stay in L1 (48 KiB). 24 diagonals and 260 columns: 390 us for 4096 x 4096, 90 %, 16 tokens
// against 417 us without chunks (Zen 5, one core). Fewer than 8 do not pay for loading the tile.
constexpr int64_t kMostDiagonals = 24, kFewestDiagonals = 8, kColumnSpan = 260;

// How far ahead values are prefetched: 4 KiB. L3 then gives 120 GB/s instead of 96 (Zen 5, one core).
constexpr int64_t kPrefetchBytes = 4096;

// One group of panels goes through all tiles before the next: two panels of 4096 columns take half
// of a 1 MiB L2 and halve how often the values come from L3.
constexpr int64_t kPanelsPerGroup = 2;

// The diagonals that meet one tile, in ascending order: for entry e the values of the tile's rows,
// and the column of x that the tile's first row meets. The kernels know whole tiles only.
// out <= in: every diagonal covers every row, so that values follow each other; out > in: pieces.
template <typename W>
struct WholeDiagonals {
  HWY_INLINE const W* Values(int64_t e) const { return values + e * rows; }
  const W* values;
  int64_t rows;
  const int32_t* cols;
  int64_t count;
};
template <typename W>
struct DiagonalPieces {
  HWY_INLINE const W* Values(int64_t e) const { return pointers[e]; }
  const W* const* pointers;
  const int32_t* cols;
  int64_t count;
};

template <typename W>
WholeDiagonals<W> ListWhole(const DiagonalTiling& tiling, const WeightView& w, int64_t row,
                            int64_t rows, const W* values, int32_t* cols) {
  const hn::ScalableTag<int32_t> d;
  const auto in = hn::Set(d, static_cast<int32_t>(w.in));
  const auto first = hn::Set(d, static_cast<int32_t>(row));
  const auto ColsOf = [&](auto offsets) HWY_ATTR {
    const auto col = tiling.square() ? hn::Sub(first, offsets) : hn::Add(first, offsets);
    const auto positive = hn::IfThenElse(hn::Lt(col, hn::Zero(d)), hn::Add(col, in), col);
    return hn::IfThenElse(hn::Lt(positive, in), positive, hn::Sub(positive, in));
  };
  int64_t k = 0;
  for (; k + kLanes <= w.count; k += kLanes) {
    hn::StoreU(ColsOf(hn::LoadU(d, w.offsets + k)), d, cols + k);
  }
  for (; k < w.count; ++k) cols[k] = hn::GetLane(ColsOf(hn::Set(d, w.offsets[k])));
  return {values, rows, cols, w.count};
}

// A piece that covers only part of the tile is copied into `filled` with zeros around it; x is zero
// there as well (ExtendRows, ExtendPanel), so that nothing but 0 · 0 is added.
template <typename W>
DiagonalPieces<W> ListPieces(const DiagonalTiling& tiling, const WeightView& w, int64_t row,
                             int64_t rows, const W* values, const DiagonalTaskScratch<W>& scratch) {
  int64_t count = 0;
  W* filled = scratch.filled;
  for (int64_t k = 0; k < w.count; ++k) {
    for (int wrap = 0; wrap < 2; ++wrap) {
      const DiagonalPiece piece = tiling.Piece(w.offsets[k], row, rows, wrap);
      if (piece.rows <= 0) continue;
      scratch.pointers[count] = values;
      scratch.cols[count] = static_cast<int32_t>(piece.col);
      if (piece.rows < rows) {
        scratch.pointers[count] = filled;
        std::fill(filled, filled + piece.first, W());
        std::copy(values, values + piece.rows, filled + piece.first);
        std::fill(filled + piece.first + piece.rows, filled + kDiagonalFilledRows, W());
        filled += kDiagonalFilledRows;
      }
      values += piece.rows;
      ++count;
    }
  }
  return {scratch.pointers, scratch.cols, count};
}

// --- few tokens: rows in lanes --------------------------------------------------------------------

// kVectors · lanes rows of y for kTokens tokens, in registers across all entries. x[token] is at
// column 0.
template <int kVectors, int kTokens, class Diagonals>
HWY_INLINE void RowsKernel(const Diagonals& diagonals, int64_t first_row, const float* x,
                           int64_t x_stride, float* tile) {
  const F32 d;
  hn::Vec<F32> acc[kTokens][kVectors];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) acc[t][v] = hn::Zero(d);
  }
  for (int64_t e = 0; e < diagonals.count; ++e) {
    const auto* values = diagonals.Values(e) + first_row;
    const float* from = x + diagonals.cols[e] + first_row;
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const auto w = LoadWeights(d, values + v * kLanes);
      hwy::Prefetch(values + v * kLanes + kPrefetchBytes / sizeof(*values));
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        acc[t][v] = hn::MulAdd(w, hn::LoadU(d, from + t * x_stride + v * kLanes), acc[t][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      hn::Store(acc[t][v], d, tile + t * kDiagonalTileRows + v * kLanes);
    }
  }
}

// Rows [0, rows) of a tile for kTokens tokens, into tile[token][row].
template <int kTokens, class Diagonals>
void RowsTile(const Diagonals& diagonals, int64_t rows, const float* x, int64_t x_stride,
              float* tile) {
  constexpr int kMost = kAccumulators / kTokens < 6 ? kAccumulators / kTokens : 6;
  int64_t row = 0;
  for (; row + kMost * kLanes <= rows; row += kMost * kLanes) {
    RowsKernel<kMost, kTokens>(diagonals, row, x, x_stride, tile + row);
  }
  for (; row + kLanes < rows; row += 2 * kLanes) {
    RowsKernel<2, kTokens>(diagonals, row, x, x_stride, tile + row);
  }
  for (; row < rows; row += kLanes) RowsKernel<1, kTokens>(diagonals, row, x, x_stride, tile + row);
}

template <class Diagonals>
void RowsTask(const LinearArgs& args, const Diagonals& diagonals, int64_t row, int64_t rows,
              const float* x, int64_t x_stride) {
  HWY_ALIGN float tile[4 * kDiagonalTileRows + 16];
  for (int64_t token = 0; token < args.tokens; token += 4) {
    const int64_t tokens = std::min<int64_t>(4, args.tokens - token);
    const float* from = x + token * x_stride;
    switch (tokens) {
      case 1:
        RowsTile<1>(diagonals, rows, from, x_stride, tile);
        break;
      case 2:
        RowsTile<2>(diagonals, rows, from, x_stride, tile);
        break;
      case 3:
        RowsTile<3>(diagonals, rows, from, x_stride, tile);
        break;
      default:
        RowsTile<4>(diagonals, rows, from, x_stride, tile);
        break;
    }
    for (int64_t t = 0; t < tokens; ++t) {
      float* sums = tile + t * kDiagonalTileRows;
      if (args.bias != nullptr) AddArrays(sums, args.bias + row, sums, rows);
      StoreRow(args, token + t, row, rows, sums);
    }
  }
}

// --- many tokens: tokens in lanes -----------------------------------------------------------------

// Adds diagonals [begin, end) to kRows rows of the tile for one vector of tokens.
template <int kRows, class Diagonals>
HWY_INLINE void PanelKernel(const Diagonals& diagonals, int64_t begin, int64_t end,
                            int64_t first_row, const float* panel, float* tile) {
  const F32 d;
  hn::Vec<F32> acc[kRows];
#pragma GCC unroll 32
  for (int r = 0; r < kRows; ++r) acc[r] = hn::Load(d, tile + r * kLanes);
  for (int64_t e = begin; e < end; ++e) {
    const auto* values = diagonals.Values(e) + first_row;
    using W = std::remove_cvref_t<decltype(*values)>;
    const float* from = panel + (diagonals.cols[e] + first_row) * kLanes;
    // The next chunk's values: rows of a tile are read a few at a time, no stream for hardware.
    hwy::Prefetch(values + kMostDiagonals * kDiagonalTileRows);
    if constexpr (kRows * sizeof(W) > 64) {
      hwy::Prefetch(values + kMostDiagonals * kDiagonalTileRows + kRows - 1);
    }
#pragma GCC unroll 8
    for (int q = 0; q < kRows; q += 4) {
      WeightQuad<F32, W> quad;
      quad.Load(values + q);
      const float* x = from + q * kLanes;
      acc[q] = hn::MulAdd(quad.template Lane<0>(), hn::Load(d, x), acc[q]);
      acc[q + 1] = hn::MulAdd(quad.template Lane<1>(), hn::Load(d, x + kLanes), acc[q + 1]);
      acc[q + 2] = hn::MulAdd(quad.template Lane<2>(), hn::Load(d, x + 2 * kLanes), acc[q + 2]);
      acc[q + 3] = hn::MulAdd(quad.template Lane<3>(), hn::Load(d, x + 3 * kLanes), acc[q + 3]);
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < kRows; ++r) hn::Store(acc[r], d, tile + r * kLanes);
}

// How many diagonals from `begin` on go through all rows of the tile before the next ones: as many
// as meet columns of x that stay in L1 meanwhile.
template <class Diagonals>
int64_t ChunkEnd(const Diagonals& diagonals, int64_t begin) {
  int64_t end = begin + 1;
  while (end < diagonals.count && end - begin < kMostDiagonals &&
         std::abs(diagonals.cols[end] - diagonals.cols[begin]) <= kColumnSpan) {
    ++end;
  }
  return std::min(diagonals.count, std::max(end, begin + kFewestDiagonals));
}

// Rows [row, row + rows) of y for tokens [token, token + tokens), at most one vector of them.
template <class Diagonals>
void PanelTile(const LinearArgs& args, const Diagonals& diagonals, int64_t row, int64_t rows,
               const float* panel, int64_t token, int64_t tokens) {
  HWY_ALIGN float tile[(kDiagonalTileRows + 8) * kLanes] = {};
  for (int64_t begin = 0, end; begin < diagonals.count; begin = end) {
    end = ChunkEnd(diagonals, begin);
    int64_t r = 0;
    for (; r + kAccumulators - 4 < rows; r += kAccumulators) {
      PanelKernel<kAccumulators>(diagonals, begin, end, r, panel, tile + r * kLanes);
    }
    for (; r + 4 < rows; r += 8) {
      PanelKernel<8>(diagonals, begin, end, r, panel, tile + r * kLanes);
    }
    for (; r < rows; r += 4) {
      PanelKernel<4>(diagonals, begin, end, r, panel, tile + r * kLanes);
    }
  }
  const F32 d;
  for (int64_t r = 0; r < rows && args.bias != nullptr; ++r) {
    float* p = tile + r * kLanes;
    hn::Store(hn::Add(hn::Load(d, p), hn::Set(d, args.bias[row + r])), d, p);
  }
  StoreTile(args, token, tokens, row, rows, tile, kLanes);
}

// --- x with what lies around it -------------------------------------------------------------------

// Rows in lanes: copies of x rows, columns [-pad, in + pad): cyclic where out <= in, zeros where
// out > in.
void ExtendRows(const LinearArgs& args, bool cyclic, int64_t token, float* to) {
  const int64_t in = args.weight.in;
  const float* x = static_cast<const float*>(args.x) + token * args.x_stride;
  std::fill(to, to + kDiagonalPad, 0.0f);
  std::copy(x, x + in, to + kDiagonalPad);
  float* after = to + kDiagonalPad + in;
  for (int64_t i = 0; i < kDiagonalPad; ++i) after[i] = cyclic ? after[i - in] : 0.0f;
}

// Tokens in lanes: the same as a panel.
void ExtendPanel(const LinearArgs& args, bool cyclic, int64_t token, float* to) {
  const int64_t in = args.weight.in;
  const float* x = static_cast<const float*>(args.x) + token * args.x_stride;
  std::fill(to, to + kDiagonalPad * kLanes, 0.0f);
  FillPanel(x, args.x_stride, std::min<int64_t>(kLanes, args.tokens - token), in,
            to + kDiagonalPad * kLanes, kLanes);
  float* after = to + (kDiagonalPad + in) * kLanes;
  for (int64_t i = 0; i < kDiagonalPad * kLanes; ++i)
    after[i] = cyclic ? after[i - in * kLanes] : 0.0f;
}

template <typename W>
void RunTyped(const KernelContext& ctx, const LinearArgs& args) {
  const WeightView& w = args.weight;
  const DiagonalTiling tiling(w.out, w.in);
  const DiagonalScratch scratch(DescOf(w, args.tokens), ctx.threads);
  float* const extended = static_cast<float*>(args.scratch);
  const int64_t extended_cols = DiagonalExtendedCols(w.in);

  const bool lanes_are_tokens = args.tokens >= (kLanes == 1 ? 1 : kLanes * 3 / 4);
  const int64_t group = lanes_are_tokens ? kLanes * kPanelsPerGroup : args.tokens;
  const int64_t groups = (args.tokens + group - 1) / group;
  const int64_t step = lanes_are_tokens ? kLanes : 1;
  ctx.ParallelFor((args.tokens + step - 1) / step, [&](int64_t i) HWY_ATTR {
    float* to = extended + i * step * extended_cols;
    if (lanes_are_tokens) {
      ExtendPanel(args, !tiling.tall(), i * step, to);
    } else {
      ExtendRows(args, !tiling.tall(), i, to);
    }
  });

  const auto RunTile = [&](const auto& diagonals, int64_t row, int64_t rows,
                           int64_t first_token) HWY_ATTR {
    if (!lanes_are_tokens) {
      return RowsTask(args, diagonals, row, rows, extended + kDiagonalPad, extended_cols);
    }
    for (int64_t token = first_token; token < std::min(first_token + group, args.tokens);
         token += kLanes) {
      const float* panel = extended + token * extended_cols + kDiagonalPad * kLanes;
      PanelTile(args, diagonals, row, rows, panel, token,
                std::min<int64_t>(kLanes, args.tokens - token));
    }
  };
  const int64_t tiles = tiling.tiles();
  const int64_t tasks = std::min<int64_t>(tiles, std::max(1, ctx.threads));
  ctx.ParallelFor(tasks, [&](int64_t task) HWY_ATTR {
    const DiagonalTaskScratch<W> own(scratch, args.scratch, task);
    const int64_t begin = tiles * task / tasks, end = tiles * (task + 1) / tasks;
    for (int64_t i = 0; i < groups * (end - begin); ++i) {
      const int64_t tile = begin + i % (end - begin), token = i / (end - begin) * group;
      const int64_t row = tile * kDiagonalTileRows, rows = tiling.TileRows(tile);
      const W* values = static_cast<const W*>(tiling.TileValues(w, tile, sizeof(W)));
      if (tiling.tall()) {
        RunTile(ListPieces(tiling, w, row, rows, values, own), row, rows, token);
      } else {
        RunTile(ListWhole(tiling, w, row, rows, values, own.cols), row, rows, token);
      }
    }
  });
}

void RunDiagonal(const KernelContext& ctx, const LinearArgs& args) {
  WithWeightType(args.weight.dtype,
                 [&](auto type) HWY_ATTR { RunTyped<decltype(type)>(ctx, args); });
}

}  // namespace
}  // namespace espalier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace espalier::kernels {

HWY_EXPORT(RunDiagonal);

bool DiagonalLinearCpu::Supports(const LinearDesc& desc) {
  return desc.block_rows == 1 && desc.block_cols == 1 && desc.count >= 0;
}

size_t DiagonalLinearCpu::PackedBytes(const WeightView& weight) {
  const DiagonalTiling tiling(weight.out, weight.in);
  return tiling.table_bytes() + weight.count * weight.diagonal_length() * SizeOf(weight.dtype) + 64;
}

KernelStatus DiagonalLinearCpu::Pack(const WeightView& weight, void* packed) {
  const DiagonalTiling tiling(weight.out, weight.in);
  const size_t size = SizeOf(weight.dtype);
  auto* starts = static_cast<int64_t*>(packed);
  std::memset(packed, 0, tiling.table_bytes());  // what fills it up to its size
  std::byte* to = static_cast<std::byte*>(packed) + tiling.table_bytes();
  int64_t done = 0;
  for (int64_t tile = 0; tile < tiling.tiles(); ++tile) {
    if (tiling.tall()) starts[tile] = done;
    const int64_t row = tile * kDiagonalTileRows, rows = tiling.TileRows(tile);
    for (int64_t k = 0; k < weight.count; ++k) {
      const std::byte* diagonal =
          static_cast<const std::byte*>(weight.values) + k * weight.diagonal_length() * size;
      for (int wrap = 0; wrap < 2; ++wrap) {
        const DiagonalPiece piece = tiling.Piece(weight.offsets[k], row, rows, wrap);
        for (int64_t i = piece.first; i < piece.first + piece.rows; ++i) {
          const int64_t t = tiling.Position(row + i, piece.col + i);
          std::memcpy(to + done++ * size, diagonal + t * size, size);
        }
      }
    }
  }
  std::memset(to + done * size, 0, 64);
  return {};
}

KernelStatus DiagonalLinearCpu::Locate(const WeightView& weight, std::span<const int64_t> elements,
                                       int64_t* offsets) try {
  const DiagonalTiling tiling(weight.out, weight.in);
  const auto table_bytes = static_cast<int64_t>(tiling.table_bytes());
  const auto size = static_cast<int64_t>(SizeOf(weight.dtype));
  std::vector<int64_t> numbers(std::max(weight.out, weight.in), -1);  // diagonal of an offset
  for (int64_t k = 0; k < weight.count; ++k) numbers[weight.offsets[k]] = k;
  std::vector<int64_t> begins(2 * weight.count);  // of row 0 of the tile, for each piece
  int64_t tile = -1, done = 0;
  for (const int64_t element : elements) {
    const int64_t row = element / weight.in, col = element % weight.in;
    const int64_t offset = weight.out >= weight.in ? (row - col + weight.out) % weight.out
                                                   : (col - row + weight.in) % weight.in;
    while (tile < row / kDiagonalTileRows) {
      const int64_t first = ++tile * kDiagonalTileRows;
      for (int64_t i = 0; i < 2 * weight.count; ++i) {
        const DiagonalPiece piece = tiling.Piece(weight.offsets[i / 2], first,
                                                 tiling.TileRows(tile), static_cast<int>(i % 2));
        begins[i] = done - piece.first;
        done += std::max<int64_t>(0, piece.rows);
      }
    }
    const int64_t k = numbers[offset], top = tile * kDiagonalTileRows;
    if (k < 0) {
      *offsets++ = -1;
      continue;
    }
    const DiagonalPiece piece = tiling.Piece(offset, top, tiling.TileRows(tile), 0);
    const bool in_first = row - top >= piece.first && row - top < piece.first + piece.rows;
    *offsets++ = table_bytes + (begins[2 * k + (in_first ? 0 : 1)] + row - top) * size;
  }
  return {};
} catch (const std::bad_alloc&) {
  return {KernelCode::kOutOfMemory, "diagonal_linear: no memory to list the diagonals in"};
}

size_t DiagonalLinearCpu::ScratchBytes(const LinearDesc& desc, int threads) {
  return DiagonalScratch(desc, threads).total_bytes();
}

KernelStatus DiagonalLinearCpu::Run(const KernelContext& ctx, const LinearArgs& args) {
  HWY_DYNAMIC_DISPATCH(RunDiagonal)(ctx, args);
  return {};
}

}  // namespace espalier::kernels
#endif  // HWY_ONCE
