#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/csr_linear/cpu.cc"
#include "hwy/foreach_target.h"  // must precede highway.h: compiles this file once per instruction set
// clang-format off
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/linear/panel-inl.h"
#include "kernels/linear/weights-inl.h"
// clang-format on
#include <algorithm>

#include "kernels/csr_linear/csr_linear.h"
#include "kernels/csr_linear/scratch.h"

HWY_BEFORE_NAMESPACE();
namespace espalier::kernels::HWY_NAMESPACE {
namespace {  // families share namespaces, and equal names of templates would be merged silently

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));

// Where a row goes on in the next tile is no stream that hardware would follow: three lines of each
// array are asked for this many rows ahead. 64 tokens, weights from memory: 2.84 -> 2.71 ms.
constexpr int64_t kPrefetchRows = 8;

// Values of a row in a tile below which one-vector panels without tiles are faster (64 tokens, 99 %:
// 2.6 of them, 889 -> 436 us; 95 %: 12.8, 1.69 ms with tiles, 1.85 without).
constexpr int64_t kFewestPerTile = 8;

template <typename W>
struct Rows {
  const int32_t* ptr;
  const int32_t* cols;
  const W* values;
};

// A group of tokens that goes through the weight together: `width` lanes, `tokens` of them used.
struct Panel {
  float* x;  // [in][width]
  int64_t width;
  int64_t token;
  int64_t tokens;
};

// Adds the bias to a tile [rows][width] and stores it.
void Finish(const LinearArgs& args, const Panel& panel, int64_t row, int64_t rows, float* tile) {
  for (int64_t r = 0; r < rows && args.bias != nullptr; ++r) {
    for (int64_t t = 0; t < panel.width; ++t) tile[r * panel.width + t] += args.bias[row + r];
  }
  StoreTile(args, panel.token, panel.tokens, row, rows, tile, panel.width);
}

// --- up to one vector of tokens: rows side by side ------------------------------------------------

// kRows rows for the lanes of d, of which the panel is made. Rows advance together as far as the
// shortest goes; one row after the other would wait for the latency of each FMA.
template <int kRows, class D, typename W>
HWY_INLINE void SideBySide(D d, const Rows<W>& w, int64_t row, const float* x, float* tile) {
  constexpr int64_t kWidth = hn::MaxLanes(D());
  hn::Vec<D> acc[kRows];
  int64_t at[kRows];
  int64_t steps = w.ptr[row + 1] - w.ptr[row];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    acc[r] = hn::Zero(d);
    at[r] = w.ptr[row + r];
    steps = std::min<int64_t>(steps, w.ptr[row + r + 1] - w.ptr[row + r]);
  }
  const auto Add = [&](int64_t i, hn::Vec<D> sum) HWY_ATTR {
    const auto value = hn::Set(d, ToFloat(w.values + i));
    return hn::MulAdd(value, hn::LoadU(d, x + w.cols[i] * kWidth), sum);
  };
  // The next rows, in the order they lie in memory: too many streams for hardware to follow.
  const int64_t next = w.ptr[row + kRows];
  for (int64_t step = 0; step < steps; ++step) {
    hwy::Prefetch(w.values + next + step * kRows);
    hwy::Prefetch(w.cols + next + step * kRows);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) acc[r] = Add(at[r] + step, acc[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    for (int64_t i = at[r] + steps; i < w.ptr[row + r + 1]; ++i) acc[r] = Add(i, acc[r]);
    hn::StoreU(acc[r], d, tile + r * kWidth);
  }
}

template <class D, typename W>
void RowsSideBySide(D d, const LinearArgs& args, const Rows<W>& w, const Panel& panel,
                    int64_t begin, int64_t end, float* tile) {
  for (int64_t row = begin; row < end; row += kCsrRowBlock) {
    const int64_t rows = std::min(kCsrRowBlock, end - row);
    int64_t r = 0;
    for (; r + 8 <= rows; r += 8) SideBySide<8>(d, w, row + r, panel.x, tile + r * panel.width);
    for (; r < rows; ++r) SideBySide<1>(d, w, row + r, panel.x, tile + r * panel.width);
    Finish(args, panel, row, rows, tile);
  }
}

// --- more tokens: tiles of columns ------------------------------------------------------------------

// Rows [row, row + rows) of the tile: values in columns [.., col_end) from where `at` stands in each
// row; moves `at` on.
template <int kVectors, typename W>
HWY_INLINE void AddColumns(const Rows<W>& w, int64_t row, int64_t rows, int32_t col_end,
                           const float* x, int32_t* at, float* tile) {
  const F32 d;
  constexpr int64_t kWidth = kVectors * kLanes;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t end = w.ptr[row + r + 1];
    int64_t i = at[r];
    if (r + kPrefetchRows < rows) {
      const int64_t ahead = at[r + kPrefetchRows];
      for (int64_t i = ahead; i < ahead + 48; i += 16) {
        hwy::Prefetch(w.values + i);
        hwy::Prefetch(w.cols + i);
      }
    }
    if (i == end || w.cols[i] >= col_end) continue;
    hn::Vec<F32> acc[kVectors];
    float* sums = tile + r * kWidth;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[v] = hn::Load(d, sums + v * kLanes);
    do {
      const auto value = hn::Set(d, ToFloat(w.values + i));
      const float* from = x + w.cols[i] * kWidth;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        acc[v] = hn::MulAdd(value, hn::Load(d, from + v * kLanes), acc[v]);
      }
      ++i;
    } while (i < end && w.cols[i] < col_end);
    at[r] = static_cast<int32_t>(i);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::Store(acc[v], d, sums + v * kLanes);
  }
}

template <int kVectors, typename W>
void ColumnTiles(const LinearArgs& args, const Rows<W>& w, const Panel& panel, int64_t begin,
                 int64_t end, int32_t* at, float* tile) {
  const int64_t tile_cols = kCsrTileBytes / static_cast<int64_t>(panel.width * sizeof(float));
  for (int64_t row = begin; row < end; row += kCsrRowBlock) {
    const int64_t rows = std::min(kCsrRowBlock, end - row);
    std::fill(tile, tile + rows * panel.width, 0.0f);
    std::copy(w.ptr + row, w.ptr + row + rows, at);
    for (int64_t col = 0; col < args.weight.in; col += tile_cols) {
      const auto col_end = static_cast<int32_t>(std::min(args.weight.in, col + tile_cols));
      AddColumns<kVectors>(w, row, rows, col_end, panel.x, at, tile);
    }
    Finish(args, panel, row, rows, tile);
  }
}

// --- both -------------------------------------------------------------------------------------------

template <typename W>
void RunPanel(const LinearArgs& args, const Panel& panel, int64_t begin, int64_t end, int32_t* at,
              float* tile) {
  const WeightView& weight = args.weight;
  const Rows<W> w{weight.row_ptr, weight.col_idx, static_cast<const W*>(weight.values)};
  if (panel.width > kLanes) {
    if (panel.width == 2 * kLanes) return ColumnTiles<2>(args, w, panel, begin, end, at, tile);
    return ColumnTiles<4>(args, w, panel, begin, end, at, tile);
  }
  switch (panel.width) {
    case 1:
      return RowsSideBySide(hn::CappedTag<float, 1>(), args, w, panel, begin, end, tile);
    case 2:
      return RowsSideBySide(hn::CappedTag<float, 2>(), args, w, panel, begin, end, tile);
    case 4:
      return RowsSideBySide(hn::CappedTag<float, 4>(), args, w, panel, begin, end, tile);
    case 8:
      return RowsSideBySide(hn::CappedTag<float, 8>(), args, w, panel, begin, end, tile);
    default:
      return RowsSideBySide(hn::CappedTag<float, 16>(), args, w, panel, begin, end, tile);
  }
}

// Four vectors, or one where a tile would hold too few values of a row to pay for visiting it.
int64_t WidestPanel(const WeightView& w) {
  const int64_t tile_cols = kCsrTileBytes / (4 * kLanes * static_cast<int64_t>(sizeof(float)));
  const bool enough = w.count * std::min(tile_cols, w.in) >= kFewestPerTile * w.out * w.in;
  return enough ? 4 * kLanes : kLanes;
}

// Panels of the widest kind; the last one is as narrow as its tokens allow.
Panel PanelAt(const LinearArgs& args, int64_t widest, int64_t index, float* panels) {
  const int64_t token = index * widest;
  Panel panel{panels + token * args.weight.in, widest, token, args.tokens - token};
  while (panel.width > 1 && panel.width / 2 >= panel.tokens) panel.width /= 2;
  panel.tokens = std::min(panel.tokens, panel.width);
  return panel;
}

void RunCsr(const KernelContext& ctx, const LinearArgs& args) {
  const WeightView& w = args.weight;
  const CsrScratch scratch(DescOf(w, args.tokens), ctx.threads);
  std::byte* const base = static_cast<std::byte*>(args.scratch);
  float* const panels = reinterpret_cast<float*>(base);
  const int64_t widest = WidestPanel(w);
  const int64_t count = (args.tokens + widest - 1) / widest;
  ctx.ParallelFor(count, [&](int64_t i) HWY_ATTR {
    const Panel panel = PanelAt(args, widest, i, panels);
    FillPanel(static_cast<const float*>(args.x) + panel.token * args.x_stride, args.x_stride,
              panel.tokens, w.in, panel.x, panel.width);
  });
  const int64_t tasks = std::min<int64_t>(std::max(1, ctx.threads), w.out);
  ctx.ParallelFor(tasks, [&](int64_t task) HWY_ATTR {
    std::byte* const own = base + scratch.panels_bytes + task * scratch.task_bytes;
    auto* const tile = reinterpret_cast<float*>(own);
    auto* const at = reinterpret_cast<int32_t*>(own + kCsrTaskTileBytes);
    const int64_t begin = CsrBoundary(w, task, tasks), end = CsrBoundary(w, task + 1, tasks);
    for (int64_t i = 0; i < count; ++i) {
      const Panel panel = PanelAt(args, widest, i, panels);
      WithWeightType(w.dtype, [&](auto type) HWY_ATTR {
        RunPanel<decltype(type)>(args, panel, begin, end, at, tile);
      });
    }
  });
}

}  // namespace
}  // namespace espalier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace espalier::kernels {

HWY_EXPORT(RunCsr);

bool CsrLinearCpu::Supports(const LinearDesc&) { return true; }

size_t CsrLinearCpu::PackedBytes(const WeightView&) { return 0; }

KernelStatus CsrLinearCpu::Pack(const WeightView&, void*) { return {}; }

KernelStatus CsrLinearCpu::Locate(const WeightView& weight, std::span<const int64_t> elements,
                                  int64_t* offsets) {
  const auto size = static_cast<int64_t>(SizeOf(weight.dtype));
  for (const int64_t element : elements) {
    const int64_t row = element / weight.in, col = element % weight.in;
    const int32_t* end = weight.col_idx + weight.row_ptr[row + 1];
    const int32_t* at = std::lower_bound(weight.col_idx + weight.row_ptr[row], end, col);
    *offsets++ = at != end && *at == col ? (at - weight.col_idx) * size : -1;
  }
  return {};
}

size_t CsrLinearCpu::ScratchBytes(const LinearDesc& desc, int threads) {
  return CsrScratch(desc, threads).total_bytes();
}

KernelStatus CsrLinearCpu::Run(const KernelContext& ctx, const LinearArgs& args) {
  HWY_DYNAMIC_DISPATCH(RunCsr)(ctx, args);
  return {};
}

}  // namespace espalier::kernels
#endif  // HWY_ONCE
