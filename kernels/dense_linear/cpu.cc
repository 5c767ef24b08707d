#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/dense_linear/cpu.cc"
#include "hwy/foreach_target.h"  // must precede highway.h: compiles this file once per instruction set
// clang-format off
#include "hwy/highway.h"
#include "kernels/linear/epilogue-inl.h"
#include "kernels/linear/weights-inl.h"
// clang-format on
#include <algorithm>
#include <cstring>

#include "kernels/dense_linear/dense_linear.h"
#include "kernels/dense_linear/scratch.h"
#include "kernels/dense_linear/tiling.h"

HWY_BEFORE_NAMESPACE();
namespace espalier::kernels::HWY_NAMESPACE {
namespace {  // families share namespaces, and equal names of templates would be merged silently

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F32()));

// A register tile of 6 tokens x 4 vectors of rows needs 24 accumulators, 4 weights and one x: 29 of AVX-512's 32
// registers; 6 x 2 needs 15 of 16. Either way the FMAs outnumber the loads by more than two to one.
constexpr int kTileTokens = 6;
constexpr int kTileVectors = kLanes >= 16 ? 4 : 2;

// One block of weights and where its products go: to[t][r] = from[t][r] + Σ_c x[t][c] · weights[c][r].
template <typename W>
struct Block {
  const W* weights;
  int64_t width;  // rows of the tile: from one column to the next
  int64_t cols;
  const float* x;
  int64_t x_stride;
  const float* from;
  int64_t from_stride;
  float* to;
  int64_t to_stride;
  const std::byte* next = nullptr;  // kLines cache lines from here on are fetched with every column

  Block<float> With(const float* other) const {
    return {other, width, cols, x, x_stride, from, from_stride, to, to_stride, next};
  }
};

template <int kTokens, int kVectors, int kLines, typename W>
HWY_NOINLINE void MultiplyBlock(const Block<W>& block) {
  const F32 d;
  hn::Vec<F32> acc[kTokens][kVectors];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      acc[t][v] = hn::LoadU(d, block.from + t * block.from_stride + v * kLanes);
  }
  const W* weights = block.weights;
  const std::byte* next = block.next;
  const float* x[kTokens];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) x[t] = block.x + t * block.x_stride;
  const int64_t width = block.width;
  for (int64_t c = 0; c < block.cols; ++c, weights += width, next += kLines * 64) {
#pragma GCC unroll 8
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(next + line * 64, 0, 2);
    hn::Vec<F32> w[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) w[v] = LoadWeights(d, weights + v * kLanes);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const auto xt = hn::Set(d, x[t][c]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[t][v] = hn::MulAdd(xt, w[v], acc[t][v]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      hn::StoreU(acc[t][v], d, block.to + t * block.to_stride + v * kLanes);
  }
}

template <int kVectors, int kLines, typename W>
HWY_INLINE void MultiplyTokens(int64_t tokens, const Block<W>& block) {
  switch (tokens) {
    case 1:
      return MultiplyBlock<1, kVectors, kLines>(block);
    case 2:
      return MultiplyBlock<2, kVectors, kLines>(block);
    case 3:
      return MultiplyBlock<3, kVectors, kLines>(block);
    case 4:
      return MultiplyBlock<4, kVectors, kLines>(block);
    case 5:
      return MultiplyBlock<5, kVectors, kLines>(block);
    default:
      return MultiplyBlock<6, kVectors, kLines>(block);
  }
}

// `lines` of {0, 1, 2, 4}.
template <typename W>
void Multiply(int64_t tokens, int64_t vectors, int64_t lines, const Block<W>& block) {
  switch (vectors) {
    case 1:
      return MultiplyTokens<1, 1>(tokens, block);
    case 3:
      return MultiplyTokens<std::min(3, kTileVectors), 1>(tokens, block);
    case kTileVectors:
      if (lines == 0) return MultiplyTokens<kTileVectors, 0>(tokens, block);
      if (lines == 1) return MultiplyTokens<kTileVectors, 1>(tokens, block);
      if (lines == 2) return MultiplyTokens<kTileVectors, 2>(tokens, block);
      return MultiplyTokens<kTileVectors, 4>(tokens, block);
    default:
      return MultiplyTokens<2, 1>(tokens, block);
  }
}

// All tokens of a block of weights, which stays in cache meanwhile; the passes share the fetching of what comes next.
template <typename W>
void MultiplyAll(int64_t tokens, Block<W> block, const std::byte* next, int64_t next_lines) {
  const Block<W> whole = block;
  const int64_t groups = (tokens + kTileTokens - 1) / kTileTokens;
  const int64_t vectors = std::min<int64_t>(kTileVectors, block.width / kLanes);
  const int64_t passes = groups * (block.width / (vectors * kLanes));
  const int64_t share = passes >= next_lines ? 1 : passes * 2 >= next_lines ? 2 : 4;
  int64_t fetched = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t token = tokens * g / groups, group = tokens * (g + 1) / groups - token;
    for (int64_t row = 0; row < block.width; row += vectors * kLanes) {
      block.weights = whole.weights + row;
      block.x = whole.x + token * block.x_stride;
      block.from = whole.from + token * block.from_stride + row;
      block.to = whole.to + token * block.to_stride + row;
      block.next = next + fetched * block.cols * 64;
      Multiply(group, vectors, fetched < next_lines ? share : 0, block);
      fetched += share;
    }
  }
}

template <typename W>
void Expand(const W* from, int64_t count, float* to) {
  const F32 d;
  for (int64_t i = 0; i < count; i += kLanes) hn::StoreU(LoadWeights(d, from + i), d, to + i);
}

// Rows of one tile for at most kDenseTokenBlock tokens.
template <typename W>
void RunTile(const LinearArgs& args, const DenseTiling& tiling, int64_t tile, int64_t token,
             int64_t tokens, const DenseTaskScratch& scratch) {
  const int64_t row = tile * kDenseTileRows, rows = tiling.Rows(tile), width = tiling.Width(tile);
  const int64_t in = args.weight.in;
  const W* weights = static_cast<const W*>(args.weight.packed) + tiling.Start(tile);
  float* const y = static_cast<float*>(args.y) + token * args.y_stride + row;
  // Else the last block goes through scratch as well: y may be the residual.
  const bool direct = rows == width && args.residual == nullptr;

  HWY_ALIGN float bias[kDenseTileRows] = {};
  if (args.bias != nullptr) std::copy_n(args.bias + row, rows, bias);
  for (int64_t col = 0; col < in; col += kDenseBlockCols) {
    const int64_t cols = std::min(kDenseBlockCols, in - col);
    const bool first = col == 0, last = col + cols == in;
    Block<W> block;
    block.weights = weights + col * width;
    block.width = width;
    block.cols = cols;
    block.x = static_cast<const float*>(args.x) + token * args.x_stride + col;
    block.x_stride = args.x_stride;
    block.from = first ? bias : scratch.partial;
    block.from_stride = first ? 0 : kDenseTileRows;
    block.to = last && direct ? y : scratch.partial;
    block.to_stride = last && direct ? args.y_stride : kDenseTileRows;
    const auto* next = reinterpret_cast<const std::byte*>(block.weights + cols * width);
    const int64_t next_lines = width * sizeof(W) / 64;
    if (sizeof(W) == sizeof(float) || tokens <= 2 * kTileTokens) {
      MultiplyAll(tokens, block, next, next_lines);
    } else {
      Expand(block.weights, cols * width, scratch.expanded);
      MultiplyAll(tokens, block.With(scratch.expanded), next, next_lines);
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const float* sums = direct ? y + t * args.y_stride : scratch.partial + t * kDenseTileRows;
    StoreRow(args, token + t, row, rows, sums);
  }
}

template <typename W>
void RunTyped(const KernelContext& ctx, const LinearArgs& args) {
  const LinearDesc desc = DescOf(args.weight, args.tokens);
  const DenseTiling tiling(desc.out, desc.in);
  const DenseTasks tasks(desc, ctx.threads);
  ctx.ParallelFor(tasks.count(), [&](int64_t task) HWY_ATTR {
    const DenseTaskScratch scratch(desc, args.scratch, task);
    const DenseTasks::Part part = tasks.Of(task);
    for (int64_t tile = part.tile; tile < part.tile_end; ++tile) {
      for (int64_t token = part.token; token < part.token_end; token += kDenseTokenBlock) {
        RunTile<W>(args, tiling, tile, token, std::min(kDenseTokenBlock, part.token_end - token),
                   scratch);
      }
    }
  });
}

void RunDense(const KernelContext& ctx, const LinearArgs& args) {
  WithWeightType(args.weight.dtype,
                 [&](auto type) HWY_ATTR { RunTyped<decltype(type)>(ctx, args); });
}

}  // namespace
}  // namespace espalier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace espalier::kernels {

HWY_EXPORT(RunDense);

namespace {

template <typename T>
void PackTiles(const DenseTiling& tiling, const WeightView& weight, T* packed) {
  const T* values = static_cast<const T*>(weight.values);
  for (int64_t tile = 0; tile < tiling.tiles(); ++tile) {
    const int64_t rows = tiling.Rows(tile), width = tiling.Width(tile);
    const T* from = values + tile * kDenseTileRows * weight.in;
    T* to = packed + tiling.Start(tile);
    if (rows < width || weight.in < tiling.padded_in()) {
      std::fill_n(to, width * tiling.padded_in(), T{});
    }
    // One cache line of columns at a time: rows that are a power of two apart evict each other.
    constexpr int64_t kLine = 16;
    for (int64_t col = 0; col < weight.in; col += kLine) {
      const int64_t end = std::min(col + kLine, weight.in);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = col; c < end; ++c) to[c * width + r] = from[r * weight.in + c];
      }
    }
  }
}

}  // namespace

bool DenseLinearTiled::Supports(const LinearDesc&) { return true; }

size_t DenseLinearTiled::PackedBytes(const WeightView& weight) {
  return DenseTiling(weight.out, weight.in).elements() * SizeOf(weight.dtype);
}

KernelStatus DenseLinearTiled::Pack(const WeightView& weight, void* packed) {
  const DenseTiling tiling(weight.out, weight.in);
  if (SizeOf(weight.dtype) == 4) {
    PackTiles(tiling, weight, static_cast<uint32_t*>(packed));
  } else {
    PackTiles(tiling, weight, static_cast<uint16_t*>(packed));
  }
  return {};
}

KernelStatus DenseLinearTiled::Locate(const WeightView& weight, std::span<const int64_t> elements,
                                      int64_t* offsets) {
  const DenseTiling tiling(weight.out, weight.in);
  const auto size = static_cast<int64_t>(SizeOf(weight.dtype));
  for (const int64_t element : elements) {
    const int64_t row = element / weight.in, col = element % weight.in;
    const int64_t tile = row / kDenseTileRows;
    *offsets++ = (tiling.Start(tile) + col * tiling.Width(tile) + row % kDenseTileRows) * size;
  }
  return {};
}

size_t DenseLinearTiled::ScratchBytes(const LinearDesc& desc, int threads) {
  return DenseTasks(desc, threads).count() * DenseTaskScratch::Bytes(desc);
}

KernelStatus DenseLinearTiled::Run(const KernelContext& ctx, const LinearArgs& args) {
  HWY_DYNAMIC_DISPATCH(RunDense)(ctx, args);
  return {};
}

}  // namespace espalier::kernels
#endif  // HWY_ONCE
