#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/block_csr_linear/cpu.cc"
#include "hwy/foreach_target.h"  // must precede highway.h: compiles this file once per instruction set
// clang-format off
#include "hwy/highway.h"
#include "kernels/linear/epilogue-inl.h"
#include "kernels/linear/panel-inl.h"
#include "kernels/linear/weights-inl.h"
// clang-format on
#include <algorithm>
#include <cstring>

#include "kernels/block_csr_linear/block_csr_linear.h"
#include "kernels/block_csr_linear/block_steps.h"
#include "kernels/block_csr_linear/strips.h"

HWY_BEFORE_NAMESPACE();
namespace espalier::kernels::HWY_NAMESPACE {
namespace {  // families share namespaces, and equal names of templates would be merged silently

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));

// Tokens that share one pass over the weights when rows are lanes, two vectors of rows each.
constexpr int kRowsTokens = kLanes >= 16 ? 8 : 4;
// Rows that share one pass when tokens are lanes, two vectors of tokens each.
constexpr int kPanelRows = kLanes >= 16 ? 8 : 4;
// Fewer tokens than this are cheaper with rows as lanes. One-lane code is the same either way.
constexpr int kPanelTokens = kLanes == 1 ? 1 : kRowsTokens + 1;
constexpr int kPanelWidth = 2 * kLanes;

// What a kernel needs of a strip; the weights of row 0. A kernel returns the columns that follow the strip's.
template <typename W, typename Columns>
struct StripWeights {
  const W* values;
  int64_t packed_rows;
  Columns columns;
  int64_t blocks;
  int64_t block_cols;
  int64_t in;
};

// --- few tokens: rows in lanes --------------------------------------------------------------------

// Rows [0, kVectors · lanes) of the strip for kTokens tokens, added to the bias, into
// tile[token][row]. Rows past the strip's own are computed from whatever follows and are not used.
template <int kTokens, int kVectors, typename W, typename Columns>
HWY_NOINLINE Columns RowsKernel(const StripWeights<W, Columns>& strip, const float* x,
                                int64_t x_stride, const float* bias, float* tile) {
  const F32 d;
  hn::Vec<F32> acc[kTokens][kVectors];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) acc[t][v] = hn::Zero(d);
  }
  const W* values = strip.values;
  Columns columns = strip.columns;
  const float* behind = x;
  for (int64_t b = 0; b < strip.blocks; ++b) {
    const auto place = columns.template Next<1>(strip.block_cols, behind);
    const int64_t cols = std::min(strip.block_cols, columns.template Left<1>(place, x, strip.in));
    const float* from = columns.template From<1>(place, x);
    behind = from + strip.block_cols;
#pragma GCC unroll 4
    for (int64_t c = 0; c < cols; ++c) {
      hn::Vec<F32> w[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        w[v] = LoadWeights(d, values + c * strip.packed_rows + v * kLanes);
      }
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const auto one = hn::Set(d, from[t * x_stride + c]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) acc[t][v] = hn::MulAdd(w[v], one, acc[t][v]);
      }
    }
    values += strip.block_cols * strip.packed_rows;
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      hn::Store(hn::Add(acc[t][v], hn::Load(d, bias + v * kLanes)), d,
                tile + t * kStripRows + v * kLanes);
    }
  }
  return columns.Rest();
}

template <int kTokens, typename W, typename Columns>
HWY_INLINE Columns RowsOfStrip(StripWeights<W, Columns> strip, int64_t rows, const float* x,
                               int64_t x_stride, const float* bias, float* tile) {
  Columns after = strip.columns;
  while (rows > 0) {
    const int64_t step = rows > kLanes ? 2 * kLanes : kLanes;
    if (step == kLanes) {
      after = RowsKernel<kTokens, 1>(strip, x, x_stride, bias, tile);
    } else {
      after = RowsKernel<kTokens, 2>(strip, x, x_stride, bias, tile);
    }
    strip.values += step;
    bias += step;
    tile += step;
    rows -= step;
  }
  return after;
}

// Up to kRowsTokens tokens.
template <typename W, typename Columns>
HWY_INLINE Columns RowsOfStrip(const StripWeights<W, Columns>& strip, int64_t rows, int64_t tokens,
                               const float* x, int64_t x_stride, const float* bias, float* tile) {
  switch (tokens) {
    case 1:
      return RowsOfStrip<1>(strip, rows, x, x_stride, bias, tile);
    case 2:
      return RowsOfStrip<2>(strip, rows, x, x_stride, bias, tile);
    case 3:
      return RowsOfStrip<3>(strip, rows, x, x_stride, bias, tile);
    case 4:
      return RowsOfStrip<4>(strip, rows, x, x_stride, bias, tile);
  }
  if constexpr (kRowsTokens == 8) {
    switch (tokens) {
      case 5:
        return RowsOfStrip<5>(strip, rows, x, x_stride, bias, tile);
      case 6:
        return RowsOfStrip<6>(strip, rows, x, x_stride, bias, tile);
      case 7:
        return RowsOfStrip<7>(strip, rows, x, x_stride, bias, tile);
      case 8:
        return RowsOfStrip<8>(strip, rows, x, x_stride, bias, tile);
    }
  }
  return strip.columns;  // not reached
}

// --- many tokens: tokens in lanes -----------------------------------------------------------------

// Each of four neighbouring weights in all lanes. A vector multiplies two of panel, so that broadcast
// loads leave the load ports room; 16-bit weights share one load and conversion.
template <typename W>
HWY_INLINE void SpreadWeights(const W* w, hn::Vec<F32>* spread) {
  if constexpr (sizeof(W) == sizeof(float)) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) spread[i] = hn::Set(F32(), w[i]);
  } else {
    WeightQuad<F32, W> quad;
    quad.Load(w);
    spread[0] = quad.template Lane<0>();
    spread[1] = quad.template Lane<1>();
    spread[2] = quad.template Lane<2>();
    spread[3] = quad.template Lane<3>();
  }
}

// kRows rows of the strip for kVectors vectors of tokens, added to the bias, into tile[row][token].
template <int kRows, int kVectors, typename W, typename Columns>
HWY_NOINLINE Columns PanelKernel(const StripWeights<W, Columns>& strip, const char* ahead,
                                 int64_t ahead_bytes, const float* panel, const float* bias,
                                 float* tile) {
  const F32 d;
  constexpr int kWidth = kVectors * kLanes;
  hn::Vec<F32> acc[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) acc[r][v] = hn::Zero(d);
  }
  const W* values = strip.values;
  Columns columns = strip.columns;
  const float* behind = panel;
  for (int64_t b = 0; b < strip.blocks; ++b) {
    const auto place = columns.template Next<kWidth>(strip.block_cols, behind);
    const int64_t cols =
        std::min(strip.block_cols, columns.template Left<kWidth>(place, panel, strip.in));
    const float* from = columns.template From<kWidth>(place, panel);
    behind = from + strip.block_cols * kWidth;
    for (int64_t i = 0; i < ahead_bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
    ahead += ahead_bytes;
#pragma GCC unroll 2
    for (int64_t c = 0; c < cols; ++c) {
      const W* w = values + c * strip.packed_rows;
      hn::Vec<F32> x[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) x[v] = hn::Load(d, from + c * kWidth + v * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r += 4) {
        hn::Vec<F32> spread[4];
        SpreadWeights(w + r, spread);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            acc[r + i][v] = hn::MulAdd(spread[i], x[v], acc[r + i][v]);
          }
        }
      }
    }
    values += strip.block_cols * strip.packed_rows;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const auto b = hn::Set(d, bias[r]);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      hn::Store(hn::Add(acc[r][v], b), d, tile + r * kWidth + v * kLanes);
    }
  }
  return columns.Rest();
}

template <int kVectors, typename W, typename Columns>
HWY_INLINE Columns PanelOfStrip(StripWeights<W, Columns> strip, int64_t rows, const float* panel,
                                const float* bias, float* tile) {
  // With one vector of tokens twice the rows: else every accumulator waits for itself.
  constexpr int kMost = kVectors == 1 ? 2 * kPanelRows : kPanelRows;
  const int64_t block_bytes = strip.block_cols * strip.packed_rows * sizeof(W);
  const int64_t ahead_bytes = block_bytes / ((rows + kMost - 1) / kMost);
  const char* ahead = reinterpret_cast<const char*>(strip.values) + strip.blocks * block_bytes;
  Columns after = strip.columns;
  while (rows > 0) {
    int64_t step = kMost;
    if (rows > kMost / 2) {
      after = PanelKernel<kMost, kVectors>(strip, ahead, ahead_bytes, panel, bias, tile);
    } else if (rows > 4) {
      step = std::max(kMost / 2, 4);
      after = PanelKernel<std::max(kMost / 2, 4), kVectors>(strip, ahead, ahead_bytes, panel, bias,
                                                            tile);
    } else {
      step = 4;
      after = PanelKernel<4, kVectors>(strip, ahead, ahead_bytes, panel, bias, tile);
    }
    ahead += ahead_bytes * strip.blocks;
    strip.values += step;
    bias += step;
    tile += step * kVectors * kLanes;
    rows -= step;
  }
  return after;
}

// --- the whole problem ----------------------------------------------------------------------------

// Tokens [first, first + tokens) that go through the weights together; width 0: rows are the lanes.
struct TokenGroup {
  int64_t first;
  int64_t tokens;
  int64_t width;
};

TokenGroup GroupAt(int64_t index, int64_t tokens) {
  const int64_t first = index * kPanelWidth;
  const int64_t left = std::min<int64_t>(kPanelWidth, tokens - first);
  return {first, left, left < kPanelTokens ? 0 : left <= kLanes ? kLanes : kPanelWidth};
}

// Returns the columns of the strip that follows.
template <typename W, typename Columns>
Columns RunStrip(const LinearArgs& args, const BlockStrip& strip, Columns columns,
                 const TokenGroup& group, const float* panel) {
  if (strip.rows <= 0) return columns;
  const WeightView& w = args.weight;
  columns.Begin(strip);
  const StripWeights<W, Columns> weights = {static_cast<const W*>(w.packed) + strip.first,
                                            strip.packed_rows,
                                            columns,
                                            strip.blocks,
                                            w.block_cols,
                                            w.in};
  HWY_ALIGN float bias[kStripRows] = {};
  if (args.bias != nullptr) std::copy_n(args.bias + strip.row, strip.rows, bias);
  HWY_ALIGN float tile[kStripRows * (kPanelWidth > kRowsTokens ? kPanelWidth : kRowsTokens)];
  if (group.width == 0) {
    const float* x = static_cast<const float*>(args.x) + group.first * args.x_stride;
    columns = RowsOfStrip(weights, strip.rows, group.tokens, x, args.x_stride, bias, tile);
    for (int64_t t = 0; t < group.tokens; ++t)
      StoreRow(args, group.first + t, strip.row, strip.rows, tile + t * kStripRows);
    return columns;
  }
  if (group.width == kLanes) {
    columns = PanelOfStrip<1>(weights, strip.rows, panel, bias, tile);
  } else {
    columns = PanelOfStrip<2>(weights, strip.rows, panel, bias, tile);
  }
  StoreTile(args, group.first, group.tokens, strip.row, strip.rows, tile, group.width);
  return columns;
}

template <typename W, typename Columns>
void RunTyped(const KernelContext& ctx, const LinearArgs& args) {
  const BlockStrips strips(args.weight);
  const int64_t groups = (args.tokens + kPanelWidth - 1) / kPanelWidth;
  const auto PanelOf = [&](const TokenGroup& group) {
    return static_cast<float*>(args.scratch) + group.first * args.weight.in;
  };
  ctx.ParallelFor(groups, [&](int64_t g) HWY_ATTR {
    const TokenGroup group = GroupAt(g, args.tokens);
    if (group.width == 0) return;
    const float* x = static_cast<const float*>(args.x) + group.first * args.x_stride;
    FillPanel(x, args.x_stride, group.tokens, args.weight.in, PanelOf(group), group.width);
  });
  // One panel stays in the cache while all weights stream past it.
  const int64_t shares = ctx.threads <= 1 ? 1 : std::min<int64_t>(strips.count(), 4 * ctx.threads);
  ctx.ParallelFor(groups * shares, [&](int64_t task) HWY_ATTR {
    const TokenGroup group = GroupAt(task / shares, args.tokens);
    const int64_t share = task % shares, end = strips.Boundary(share + 1, shares);
    int64_t i = strips.Boundary(share, shares);
    for (auto columns = Columns::First(args.weight, i); i < end; ++i) {
      columns = RunStrip<W>(args, strips.At(i), columns, group, PanelOf(group));
    }
  });
}

void RunBlockCsr(const KernelContext& ctx, const LinearArgs& args) {
  WithWeightType(args.weight.dtype, [&](auto type) HWY_ATTR {
    using W = decltype(type);
    if constexpr (sizeof(W) == 2) {
      if (BlockCsrLinearCpu::PacksColumns(args.weight)) {
        return RunTyped<W, PackedColumns>(ctx, args);
      }
    }
    RunTyped<W, ColumnIndex>(ctx, args);
  });
}

}  // namespace
}  // namespace espalier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace espalier::kernels {

HWY_EXPORT(RunBlockCsr);

namespace {

// Loads of a strip's last column run into what follows it.
constexpr size_t kSlackBytes = 64;

void LocateInSteps(const WeightView& weight, std::span<const int64_t> elements, int64_t* offsets) {
  const BlockStrips strips(weight);
  PackedColumns first = {}, columns = {};  // of the block row, and after those seen for `row`
  int64_t row = -1, column = -1, slot = -1;
  for (const int64_t element : elements) {
    const int64_t I = element / weight.in / weight.block_rows;
    const int64_t J = element % weight.in / weight.block_cols;
    if (element / weight.in != row) {
      if (row < 0 || row / weight.block_rows != I) first = PackedColumns::First(weight, I);
      columns = first;
      row = element / weight.in;
      column = slot = -1;
    }
    const int64_t blocks = weight.count == 0 ? 0 : weight.row_ptr[I + 1] - weight.row_ptr[I];
    for (; column < J && slot + 1 < blocks; ++slot) column += 1 + NextStep(columns.at);
    *offsets++ = column == J ? strips.Index(row, slot, element % weight.in) *
                                   static_cast<int64_t>(SizeOf(weight.dtype))
                             : -1;
  }
}

}  // namespace

bool BlockCsrLinearCpu::Supports(const LinearDesc& desc) {
  return desc.block_rows >= 1 && desc.block_cols >= 1 && desc.count >= 0 &&
         FitsColumnIndex16(desc.in, desc.block_cols);
}

size_t BlockCsrLinearCpu::PackedBytes(const WeightView& weight) {
  if (!PacksColumns(weight)) return ValueBytes(weight) + kSlackBytes;
  BlockStepsSize steps(weight.block_row_count());
  for (int64_t I = 0; weight.count > 0 && I < weight.block_row_count(); ++I) {
    for (int64_t i = weight.row_ptr[I]; i < weight.row_ptr[I + 1]; ++i) {
      steps.Block(I, weight.Column(i));
    }
  }
  return StepsOffset(weight) + steps.bytes() + kSlackBytes;
}

KernelStatus BlockCsrLinearCpu::Pack(const WeightView& weight, void* packed) {
  const size_t size = SizeOf(weight.dtype);
  const int64_t br = weight.block_rows, bc = weight.block_cols;
  const auto* from = static_cast<const std::byte*>(weight.values);
  auto* to = static_cast<std::byte*>(packed);
  const BlockStrips strips(weight);
  for (int64_t i = 0; i < strips.count(); ++i) {
    const BlockStrip strip = strips.At(i);
    const int64_t top = strip.row % br, first_block = strip.cols - weight.col_idx16;
    for (int64_t b = 0; b < strip.blocks; ++b) {
      const std::byte* block = from + (first_block + b) * br * bc * size;
      for (int64_t c = 0; c < bc; ++c) {
        for (int64_t r = top; r < top + strip.packed_rows; ++r, to += size) {
          std::memcpy(to, block + (r * bc + c) * size, size);
        }
      }
    }
  }
  if (PacksColumns(weight)) {
    to = std::fill_n(to, StepsOffset(weight) - ValueBytes(weight), std::byte{0});
    to = WriteBlockSteps(weight, to);
  }
  std::memset(to, 0, kSlackBytes);
  return {};
}

KernelStatus BlockCsrLinearCpu::Locate(const WeightView& weight, std::span<const int64_t> elements,
                                       int64_t* offsets) {
  const auto size = static_cast<int64_t>(SizeOf(weight.dtype));
  if (PacksColumns(weight)) {
    LocateInSteps(weight, elements, offsets);
    return {};
  }
  const BlockStrips strips(weight);
  for (const int64_t element : elements) {
    const int64_t row = element / weight.in, col = element % weight.in;
    const int64_t I = row / weight.block_rows, J = col / weight.block_cols;
    const uint16_t* const first = weight.col_idx16 + weight.row_ptr[I];
    const uint16_t* const end = weight.col_idx16 + weight.row_ptr[I + 1];
    const uint16_t* at = std::lower_bound(first, end, J);
    *offsets++ = at != end && *at == J ? strips.Index(row, at - first, col) * size : -1;
  }
  return {};
}

size_t BlockCsrLinearCpu::ScratchBytes(const LinearDesc& desc, int /*threads*/) {
  constexpr int64_t kWidestPanel = 32;  // two AVX-512 vectors
  const int64_t lanes = (desc.tokens + kWidestPanel - 1) / kWidestPanel * kWidestPanel;
  return static_cast<size_t>(lanes * desc.in) * sizeof(float);
}

KernelStatus BlockCsrLinearCpu::Run(const KernelContext& ctx, const LinearArgs& args) {
  HWY_DYNAMIC_DISPATCH(RunBlockCsr)(ctx, args);
  return {};
}

}  // namespace espalier::kernels
#endif  // HWY_ONCE
