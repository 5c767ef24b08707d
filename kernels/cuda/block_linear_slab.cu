// block_linear_slab.cu — blocks of 64 or 128 rows on Hopper: TMA-fed wgmma, weights as the 64-row operand.
//
// Persistent thread blocks of one producer warp and two consumer warpgroups. A tile is one block row times kTokens ×
// (1 or 2) tokens: with 64-row blocks each warpgroup takes its own kTokens tokens and both read the same weights, with
// 128-row blocks each takes 64 of the rows and both read the same x. The product comes out transposed (outputs × tokens)
// because wgmma's 64-row operand must be the weights; movmatrix turns the accumulators before they are stored, so that
// shared memory is left to the pipeline. What bounds it is the L2 → SM traffic of x, tokens · panels · 128 bytes, which
// is why a tile has as many tokens as the accumulators allow.
#include "kernels/cuda/block_image.h"
#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/pipeline.cuh"
#include "kernels/cuda/device/tile_walk.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/kernels.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kPanelColumns = 64;
constexpr int kRowBytes = kPanelColumns * 2;
constexpr int kConsumerWarps = 8;
constexpr int kThreads = 32 * (kConsumerWarps + 4);  // the producer's warpgroup exists to give its registers away
// 128 · 40 + 256 · 232 = 384 · 168, what a thread block of 384 threads is launched with.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kSharedLimit = 227 * 1024;

template <int kRows, int kTokens>
struct Tile {
  static constexpr int kTileTokens = kRows == 64 ? 2 * kTokens : kTokens;
  static constexpr int kBoxTokens = kTileTokens < 256 ? kTileTokens : 256;  // a tensor map box has at most 256 rows
  static constexpr int kXBytes = kTileTokens * kRowBytes;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kXBytes + kPanelBytes;
  static constexpr int kFitting = (kSharedLimit - 2 * kImageAlignment) / kStageBytes;
  static constexpr int kStages = kFitting < 8 ? kFitting : 8;
  static constexpr int kSharedBytes = kStages * kStageBytes + 2 * kImageAlignment;
  static_assert(kStages >= 3);
};

template <typename T>
struct Params {
  const RowSpan* rows;
  const Panel* panels;
  const char* values;
  int32_t row_count;
  int32_t tiles;
  LinearOutput<T> to;
};

template <typename T, int kRows, int kTokens>
__device__ __forceinline__ void Produce(const CUtensorMap* x_map, const Params<T>& params, uint32_t stages,
                                        RingBarriers barriers) {
  using Tile = Tile<kRows, kTokens>;
  const int lane = threadIdx.x % 32;
  RingPosition<Tile::kStages> ring;
  int tile = TileOf(0, params.tiles);
  RowSpan span{};
  if (tile >= 0) span = params.rows[tile % params.row_count];
  for (int round = 0; tile >= 0; ++round) {
    const int next_tile = TileOf(round + 1, params.tiles);
    RowSpan next_span{};
    if (next_tile >= 0) next_span = params.rows[next_tile % params.row_count];  // hidden behind this tile
    const int token = tile / params.row_count * Tile::kTileTokens;
    int columns = 0;
    for (int p = span.begin; p < span.end; ++p) {
      const int i = (p - span.begin) % 32;
      if (i == 0 && p + lane < span.end) columns = params.panels[p + lane].column;
      const int column = __shfl_sync(0xffffffffu, columns, i);
      if (lane == 0) {
        const uint32_t full = barriers.Full(ring.stage);
        const uint32_t x = stages + ring.stage * Tile::kStageBytes;
        Wait(barriers.Empty(ring.stage), ring.parity ^ 1);
        ArriveExpecting(full, Tile::kStageBytes);
#pragma unroll
        for (int box = 0; box < Tile::kTileTokens; box += Tile::kBoxTokens) {
          CopyBox(x + box * kRowBytes, x_map, column, token + box, full);
        }
        CopyBulk(x + Tile::kXBytes, params.values + int64_t{p} * Tile::kPanelBytes, Tile::kPanelBytes, full);
      }
      __syncwarp();
      ring.Advance();
    }
    tile = next_tile;
    span = next_span;
  }
}

// Accumulators hold image rows × tokens: turns every 8×8 piece and stores four neighbouring outputs a thread. In chunks
// of 64 tokens, so that few values besides the accumulators are live.
template <typename T, int kTokens>
__device__ __forceinline__ void StoreTransposed(const float (&acc)[kTokens / 2], const LinearOutput<T>& to, int token,
                                                int64_t first_output) {
  const int lane = threadIdx.x % 32;
  // Image row lane / 4 of a group of 16 is output 4q + e, the one 8 rows below output 4q + 2 + e (block_image.h).
  const int64_t output = first_output + lane / 8 * 4 + lane / 4 % 2;
  const float bias[2] = {BiasAt(to.bias, output, to.out), BiasAt(to.bias, output + 2, to.out)};
  const int64_t column = first_output + 4 * (lane % 4);
#pragma unroll
  for (int chunk = 0; chunk < kTokens / 64; ++chunk) {
    float values[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) values[i] = acc[32 * chunk + i] + bias[i / 2 % 2];
    Activate<T>(values, to.activation);
    int64_t row = token + 64 * chunk + lane / 4;
    T* y = to.y + row * to.y_stride;
#pragma unroll
    for (int j = 0; j < 8; ++j, row += 8, y += 8 * to.y_stride) {
      const uint32_t low = TransposeMatrix(PackPair<T>(values[4 * j], values[4 * j + 1]));
      const uint32_t high = TransposeMatrix(PackPair<T>(values[4 * j + 2], values[4 * j + 3]));
      if (row < to.tokens) StoreQuad(y, column, to.out, low, high);
    }
  }
}

template <typename T, int kRows, int kTokens>
__device__ __forceinline__ void Consume(const Params<T>& params, uint32_t stages, RingBarriers barriers) {
  using Tile = Tile<kRows, kTokens>;
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  // Which half of the stage is this warpgroup's own: tokens (64-row blocks) or weight rows (128-row blocks).
  const uint32_t x_offset = kRows == 64 ? warpgroup * kTokens * kRowBytes : 0;
  const uint32_t weight_offset = Tile::kXBytes + (kRows == 64 ? 0 : warpgroup * 64 * kRowBytes);
  RingPosition<Tile::kStages> ring;
  float acc[kTokens / 2];
  for (int round = 0;; ++round) {
    const int tile = TileOf(round, params.tiles);
    if (tile < 0) break;
    const RowSpan span = params.rows[tile % params.row_count];
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) acc[i] = 0.0f;
    int previous = -1;
    for (int p = span.begin; p < span.end; ++p) {
      Wait(barriers.Full(ring.stage), ring.parity);
      const uint32_t stage = stages + ring.stage * Tile::kStageBytes;
      const Operand<kRowBytes> weight(stage + weight_offset), x(stage + x_offset);
      FenceRegisters(acc);
      FenceProducts();
#pragma unroll
      for (int k = 0; k < kPanelColumns / 16; ++k) {
        Product<T>(acc, weight.At(k * kProductBytes), x.At(k * kProductBytes));
      }
      CommitProducts();
      FenceRegisters(acc);
      if (previous >= 0) {
        WaitProducts<1>();
        if (lane == 0) Arrive(barriers.Empty(previous));
      }
      previous = ring.stage;
      ring.Advance();
    }
    WaitProducts<0>();
    FenceRegisters(acc);
    if (previous >= 0 && lane == 0) Arrive(barriers.Empty(previous));
    const int token = tile / params.row_count * Tile::kTileTokens + (kRows == 64 ? warpgroup * kTokens : 0);
    const int64_t output = int64_t{span.row} * kRows + (kRows == 64 ? 0 : warpgroup * 64) + warp * 16;
    StoreTransposed<T, kTokens>(acc, params.to, token, output);
  }
}

template <typename T, int kRows, int kTokens>
__global__ void __launch_bounds__(kThreads, 1)
    BlockSlabKernel(const __grid_constant__ CUtensorMap x_map, const Params<T> params) {
  using Tile = Tile<kRows, kTokens>;
  extern __shared__ char shared[];
  const uint32_t stages = (SharedAddress(shared) + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
  const uint32_t barrier_base = stages + Tile::kStages * Tile::kStageBytes;
  const RingBarriers barriers{barrier_base, barrier_base + 8 * Tile::kStages};
  if (threadIdx.x == 0) InitRing(barriers, Tile::kStages, kConsumerWarps);
  __syncthreads();
  if (threadIdx.x >= 32 * kConsumerWarps) {
    ShrinkRegisters<kProducerRegisters>();
    if (threadIdx.x < 32 * (kConsumerWarps + 1)) {
      Produce<T, kRows, kTokens>(&x_map, params, stages, barriers);
    }
  } else {
    GrowRegisters<kConsumerRegisters>();
    Consume<T, kRows, kTokens>(params, stages, barriers);
  }
}

template <typename T, int kRows, int kTokens>
KernelStatus RunShape(const KernelContext& ctx, const LinearArgs& args) {
  using Tile = Tile<kRows, kTokens>;
  const BlockImage image = BlockImageOf(args.weight);
  CUtensorMap x_map;
  if (KernelStatus status = MakeTensorMap(&x_map, args.io_dtype, args.x, args.tokens, args.weight.in, args.x_stride,
                                          Tile::kBoxTokens, kPanelColumns);
      !status.ok()) {
    return status;
  }
  const char* base = static_cast<const char*>(args.weight.packed);
  const int64_t tiles = (args.tokens + Tile::kTileTokens - 1) / Tile::kTileTokens * image.block_rows_count;
  if (tiles > INT32_MAX) return {KernelCode::kUnsupported, "block slab: too many tiles for one grid"};
  const Params<T> params{reinterpret_cast<const RowSpan*>(base + image.rows_offset),
                         reinterpret_cast<const Panel*>(base + image.panels_offset),
                         base + image.values_offset,
                         static_cast<int32_t>(image.block_rows_count),
                         static_cast<int32_t>(tiles),
                         OutputOf<T>(args)};
  const int64_t blocks = tiles < MultiprocessorCount() ? tiles : MultiprocessorCount();
  return Launch(BlockSlabKernel<T, kRows, kTokens>, dim3(static_cast<unsigned>(blocks)), kThreads, Tile::kSharedBytes,
                ctx.stream, false, x_map, params);
}

template <int kTokens>
KernelStatus Run(const KernelContext& ctx, const LinearArgs& args) {
  const LinearDesc desc = DescOfArgs(args);
  if (!FitsBlockImage(desc) || desc.block_rows < 64 || desc.block_cols < 64) {
    return {KernelCode::kUnsupported, "block slab: needs 2-byte blocks with sides 64 or 128"};
  }
  if (KernelStatus status = CheckArgs(args); !status.ok() || args.tokens == 0) return status;
  const bool is_bfloat16 = args.io_dtype == DType::kBFloat16;
  if (args.weight.block_rows == 64) {
    return is_bfloat16 ? RunShape<BFloat16, 64, kTokens>(ctx, args) : RunShape<Float16, 64, kTokens>(ctx, args);
  }
  return is_bfloat16 ? RunShape<BFloat16, 128, kTokens>(ctx, args) : RunShape<Float16, 128, kTokens>(ctx, args);
}

}  // namespace

KernelStatus RunBlockSlab256(const KernelContext& ctx, const LinearArgs& args) { return Run<256>(ctx, args); }
KernelStatus RunBlockSlab128(const KernelContext& ctx, const LinearArgs& args) { return Run<128>(ctx, args); }
KernelStatus RunBlockSlab64(const KernelContext& ctx, const LinearArgs& args) { return Run<64>(ctx, args); }

}  // namespace espalier::kernels::cuda
