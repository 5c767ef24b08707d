#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/diagonal_linear/cpu.cc"
#include "hwy/foreach_target.h"  // must precede highway.h: compiles this file once per instruction set
// clang-format off
#include "hwy/highway.h"
#include "kernels/base/activation-inl.h"
#include "kernels/linear/panel-inl.h"
#include "kernels/linear/weights-inl.h"
// clang-format on
#include <algorithm>
#include <cstring>

#include "kernels/diagonal_linear/diagonal_linear.h"
#include "kernels/diagonal_linear/tiling.h"

HWY_BEFORE_NAMESPACE();
namespace espalier::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));

// Accumulators that leave room for operands: 24 of 32 registers with AVX-512, 12 of 16 elsewhere.
constexpr int kAccumulators = kLanes >= 16 ? 24 : 12;

// What one diagonal gives to the tile: values of its rows and the column that the tile's first row
// meets.
template <typename W>
struct Entry {
  const W* values;
  int64_t col;
};

// The diagonals that meet rows [row, row + rows), ascending. Pieces that cover only part of the
// tile are copied into `filled`, zeros around them, so that the kernels know whole tiles only; x is
// zero there as well (ExtendedX).
template <typename W>
int64_t ListEntries(const DiagonalTiling& tiling, const int32_t* offsets, int64_t diagonals,
                    int64_t row, int64_t rows, const W* values, W* filled, Entry<W>* entries) {
  int64_t count = 0;
  for (int64_t k = 0; k < diagonals; ++k) {
    tiling.ForEachPiece(offsets[k], row, rows, [&](const DiagonalPiece& piece) {
      if (piece.rows == rows) {
        entries[count++] = {values, piece.col};
      } else {
        std::fill(filled, filled + piece.first, W());
        std::copy(values, values + piece.rows, filled + piece.first);
        std::fill(filled + piece.first + piece.rows, filled + kDiagonalTileRows + 16, W());
        entries[count++] = {filled, piece.col};
        filled += kDiagonalTileRows + 16;
      }
      values += piece.rows;
    });
  }
  return count;
}

// --- few tokens: rows in lanes
// -----------------------------------------------------------------------------------

// kVectors · lanes rows of y for kTokens tokens, in registers across all entries. x[token] is at
// column 0.
template <int kVectors, int kTokens, typename W>
HWY_INLINE void RowsKernel(const Entry<W>* entries, int64_t count, int64_t first_row,
                           const float* x, int64_t x_stride, float* tile) {
  const F32 d;
  hn::Vec<F32> acc[kTokens][kVectors];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) acc[t][v] = hn::Zero(d);
  }
  for (int64_t e = 0; e < count; ++e) {
    const W* values = entries[e].values + first_row;
    const float* from = x + entries[e].col + first_row;
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const auto w = LoadWeights(d, values + v * kLanes);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        acc[t][v] = hn::MulAdd(w, hn::LoadU(d, from + t * x_stride + v * kLanes), acc[t][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v)
      hn::Store(acc[t][v], d, tile + t * kDiagonalTileRows + v * kLanes);
  }
}

// Rows [0, rows) of a tile for kTokens tokens, into tile[token][row].
template <int kTokens, typename W>
void RowsTile(const Entry<W>* entries, int64_t count, int64_t rows, const float* x,
              int64_t x_stride, float* tile) {
  constexpr int kMost = kAccumulators / kTokens < 6 ? kAccumulators / kTokens : 6;
  int64_t row = 0;
  for (; row + kMost * kLanes <= rows; row += kMost * kLanes) {
    RowsKernel<kMost, kTokens>(entries, count, row, x, x_stride, tile + row);
  }
  for (; row < rows; row += kLanes)
    RowsKernel<1, kTokens>(entries, count, row, x, x_stride, tile + row);
}

template <typename W>
void RowsTask(const LinearArgs& args, const Entry<W>* entries, int64_t count, int64_t row,
              int64_t rows, const float* x, int64_t x_stride) {
  HWY_ALIGN float tile[4 * kDiagonalTileRows];
  for (int64_t token = 0; token < args.tokens; token += 4) {
    const int64_t tokens = std::min<int64_t>(4, args.tokens - token);
    const float* from = x + token * x_stride;
    switch (tokens) {
      case 1:
        RowsTile<1>(entries, count, rows, from, x_stride, tile);
        break;
      case 2:
        RowsTile<2>(entries, count, rows, from, x_stride, tile);
        break;
      case 3:
        RowsTile<3>(entries, count, rows, from, x_stride, tile);
        break;
      default:
        RowsTile<4>(entries, count, rows, from, x_stride, tile);
        break;
    }
    for (int64_t t = 0; t < tokens; ++t) {
      float* y = static_cast<float*>(args.y) + (token + t) * args.y_stride + row;
      const float* from_tile = tile + t * kDiagonalTileRows;
      for (int64_t r = 0; r < rows; ++r)
        y[r] = from_tile[r] + (args.bias == nullptr ? 0.0f : args.bias[row + r]);
      if (args.activation != Activation::kNone) ActivateArray(args.activation, y, y, rows);
    }
  }
}

// --- many tokens: tokens in lanes
// --------------------------------------------------------------------------------

// kRows rows of y for one vector of tokens.
template <int kRows, typename W>
HWY_INLINE void PanelKernel(const Entry<W>* entries, int64_t count, int64_t first_row,
                            const float* panel, const float* bias, float* tile) {
  const F32 d;
  hn::Vec<F32> acc[kRows];
#pragma GCC unroll 32
  for (int r = 0; r < kRows; ++r) acc[r] = hn::Zero(d);
  for (int64_t e = 0; e < count; ++e) {
    const W* values = entries[e].values + first_row;
    const float* from = panel + (entries[e].col + first_row) * kLanes;
#pragma GCC unroll 8
    for (int q = 0; q < kRows / 4; ++q) {
      WeightQuad<F32, W> quad;
      quad.Load(values + 4 * q);
      const float* x = from + 4 * q * kLanes;
      acc[4 * q] = hn::MulAdd(quad.template Lane<0>(), hn::Load(d, x), acc[4 * q]);
      acc[4 * q + 1] = hn::MulAdd(quad.template Lane<1>(), hn::Load(d, x + kLanes), acc[4 * q + 1]);
      acc[4 * q + 2] =
          hn::MulAdd(quad.template Lane<2>(), hn::Load(d, x + 2 * kLanes), acc[4 * q + 2]);
      acc[4 * q + 3] =
          hn::MulAdd(quad.template Lane<3>(), hn::Load(d, x + 3 * kLanes), acc[4 * q + 3]);
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < kRows; ++r) {
    hn::Store(hn::Add(acc[r], hn::Set(d, bias[r])), d, tile + r * kLanes);
  }
}

template <typename W>
void PanelTile(const LinearArgs& args, const Entry<W>* entries, int64_t count, int64_t row,
               int64_t rows, const float* panel, int64_t token, int64_t tokens) {
  HWY_ALIGN float tile[kAccumulators * kLanes];
  float bias[kAccumulators] = {};
  for (int64_t r = 0; r < rows; r += kAccumulators) {
    const int64_t n = std::min<int64_t>(kAccumulators, rows - r);
    if (args.bias != nullptr) std::copy(args.bias + row + r, args.bias + row + r + n, bias);
    if (n > kAccumulators - 4) {
      PanelKernel<kAccumulators>(entries, count, r, panel, bias, tile);
    } else {
      int64_t done = 0;
      for (; n - done > 4; done += 8)
        PanelKernel<8>(entries, count, r + done, panel, bias + done, tile + done * kLanes);
      if (done < n)
        PanelKernel<4>(entries, count, r + done, panel, bias + done, tile + done * kLanes);
    }
    StoreTile(tile, kLanes, n, tokens, args.activation,
              static_cast<float*>(args.y) + token * args.y_stride + row + r, args.y_stride);
  }
}

// --- x with what lies around it
// ----------------------------------------------------------------------------------

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
  std::byte* const base = static_cast<std::byte*>(args.scratch);
  float* const extended = reinterpret_cast<float*>(base);
  const int64_t extended_cols = DiagonalExtendedCols(w.in);

  const bool lanes_are_tokens = args.tokens >= (kLanes == 1 ? 1 : kLanes / 2);
  const int64_t step = lanes_are_tokens ? kLanes : 1;
  const int64_t groups = (args.tokens + step - 1) / step;
  ctx.ParallelFor(groups, [&](int64_t g) HWY_ATTR {
    float* to = extended + g * step * extended_cols;
    if (lanes_are_tokens) {
      ExtendPanel(args, !tiling.tall(), g * step, to);
    } else {
      ExtendRows(args, !tiling.tall(), g, to);
    }
  });

  const int64_t tiles = tiling.tiles();
  const int64_t tasks = std::min<int64_t>(tiles, ctx.threads);
  ctx.ParallelFor(tasks, [&](int64_t task) HWY_ATTR {
    std::byte* const own = base + scratch.extended_bytes + task * scratch.task_bytes;
    auto* const entries = reinterpret_cast<Entry<W>*>(own);
    W* const filled = reinterpret_cast<W*>(own + scratch.entries_bytes);
    for (int64_t tile = tiles * task / tasks; tile < tiles * (task + 1) / tasks; ++tile) {
      const int64_t row = tile * kDiagonalTileRows, rows = tiling.TileRows(tile);
      const W* values = static_cast<const W*>(tiling.TileValues(w, tile, sizeof(W)));
      const int64_t count =
          ListEntries(tiling, w.offsets, w.count, row, rows, values, filled, entries);
      if (!lanes_are_tokens) {
        RowsTask(args, entries, count, row, rows, extended + kDiagonalPad, extended_cols);
        continue;
      }
      for (int64_t token = 0; token < args.tokens; token += kLanes) {
        const float* panel = extended + token * extended_cols + kDiagonalPad * kLanes;
        PanelTile(args, entries, count, row, rows, panel, token,
                  std::min<int64_t>(kLanes, args.tokens - token));
      }
    }
  });
}

void RunDiagonal(const KernelContext& ctx, const LinearArgs& args) {
  WithWeightType(args.weight.dtype,
                 [&](auto type) HWY_ATTR { RunTyped<decltype(type)>(ctx, args); });
}

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
  std::byte* to = static_cast<std::byte*>(packed) + tiling.table_bytes();
  int64_t done = 0;
  for (int64_t tile = 0; tile < tiling.tiles(); ++tile) {
    if (tiling.tall()) starts[tile] = done;
    const int64_t row = tile * kDiagonalTileRows, rows = tiling.TileRows(tile);
    for (int64_t k = 0; k < weight.count; ++k) {
      const std::byte* diagonal =
          static_cast<const std::byte*>(weight.values) + k * weight.diagonal_length() * size;
      tiling.ForEachPiece(weight.offsets[k], row, rows, [&](const DiagonalPiece& piece) {
        for (int64_t r = 0; r < piece.rows; ++r) {
          const int64_t i = piece.first + r;
          std::memcpy(to + (done + r) * size,
                      diagonal + tiling.Position(row + i, piece.col + i) * size, size);
        }
        done += piece.rows;
      });
    }
  }
  std::memset(to + done * size, 0, 64);
  return {};
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
