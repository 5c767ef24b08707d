// block_linear_slab.cu — blocks of 64 or 128 rows on Hopper: TMA-fed wgmma, weights as the 64-row operand.
//
// Persistent thread blocks of producer warps and two consumer warpgroups, in one of three modes:
//   kSharedWeights  (64-row blocks) a tile is one block row times 2 · kTokens tokens, kTokens a warpgroup;
//   kSharedX        (128-row blocks) a tile is one block row times kTokens tokens, 64 of the rows a warpgroup;
//   kTwin           (64-row blocks) each warpgroup has a tile of kTokens, a producer and a ring of its own, so that one
//                   multiplies while the other is in its epilogue: for layers with few blocks a row.
// Of tiles of 64 tokens two thread blocks fit a multiprocessor, to the same end. Tiles of 16 are for few tokens: what counts
// then is how soon and evenly weights are read, and the first of them are asked for before the kernel before has ended.
// The product comes out transposed (outputs × tokens)
// because wgmma's 64-row operand must be the weights; stmatrix turns it on its way to shared memory, from where the copy
// engine stores it while the next tile is already being multiplied. What bounds the kernel is the L2 → SM traffic of x,
// tokens · panels · 128 bytes, which is why a tile has as many tokens as accumulators and shared memory allow.
//
// H200, 10,240³, 90 %: with stores straight from registers 482 µs (b = 64) and 414 µs (b = 128), of which the tensor
// cores sat out the epilogues; x traffic alone takes 375 and 190 µs at 9 TB/s. 768 → 3072 at 90 %, 1,576 tokens: two
// thread blocks of 64-token tiles 9.3 µs, the next best form 10.0; with spans, columns and first weights fetched before the
// kernel before has ended 8.7. 10,240² at 90 %, 16 tokens, cold: tiles of 16 tokens 8.0 µs (b = 64) and 7.5 (128), where the
// kernel that shares block rows inside clusters takes 12.2 and 12.3 (block_linear_stream.cu).
#include "kernels/cuda/block_image.h"
#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/pipeline.cuh"
#include "kernels/cuda/device/staging.cuh"
#include "kernels/cuda/device/tile_walk.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/kernels.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kPanelColumns = 64;
constexpr int kRowBytes = kPanelColumns * 2;
constexpr int kConsumerWarps = 8;
constexpr int kThreads =
    32 * (kConsumerWarps + 4);  // the producer's warpgroup exists to give its registers away
// Of one thread block a multiprocessor 128 · 40 + 256 · 232 = 384 · 168, of two 128 · 40 + 256 · 96 < 384 · 80: what a
// thread block of 384 threads is launched with.
constexpr int kProducerRegisters = 40;
constexpr int ConsumerRegisters(int resident) { return resident == 1 ? 232 : 96; }
constexpr int SharedLimit(int resident) { return (228 / resident - 1) * 1024; }

enum class Mode { kSharedWeights, kSharedX, kTwin };

// kResident: thread blocks a multiprocessor.
template <Mode kMode, int kTokens, int kResident>
struct Tile {
  static constexpr int kRows = kMode == Mode::kSharedX ? 128 : 64;
  static constexpr int kTileTokens = kMode == Mode::kSharedWeights ? 2 * kTokens : kTokens;
  static constexpr int kRings = kMode == Mode::kTwin ? 2 : 1;
  static constexpr int kXBytes = kTileTokens * kRowBytes;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kXBytes + kPanelBytes;
  static constexpr int kOutputBytes = kTokens * kRowBytes;  // 64 outputs × kTokens, a warpgroup
  // A second staging buffer lets a store drain during the whole next tile; the largest tiles have no room for it, and so
  // many products that they do not need it.
  static constexpr int kBuffers = kTokens > 128 ? 1 : 2;
  static constexpr int kFixedBytes = 2 * kBuffers * kOutputBytes + 2 * kImageAlignment;
  static constexpr int kFitting = (SharedLimit(kResident) - kFixedBytes) / (kStageBytes * kRings);
  static constexpr int kStages = kFitting < 8 ? kFitting : 8;  // a ring
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = kRings * kRingBytes + kFixedBytes;
  static_assert(kStages >= 2 && kTokens <= 256);
};

template <typename T>
struct Params {
  const RowSpan* rows;
  const Panel* panels;
  const char* values;
  int32_t row_count;
  int32_t tiles;
  int32_t
      last_token_tile;  // a narrowing layer walks the tokens backwards: the end of its wide x, just written by the
  bool backwards;  // layer before, is still in L2
  LinearOutput<T> to;

  __device__ __forceinline__ int TokenTile(int tile) const {
    const int forwards = tile / row_count;
    return backwards ? last_token_tile - forwards : forwards;
  }
};

// Which tiles a ring walks: thread blocks, or the two halves of each.
struct Worker {
  int index, count;
};

template <typename T, Mode kMode, int kTokens, int kResident>
__device__ __forceinline__ void Produce(const CUtensorMap* x_map, const Params<T>& params,
                                        Worker worker, uint32_t stages, RingBarriers barriers) {
  using Tile = Tile<kMode, kTokens, kResident>;
  const int lane = threadIdx.x % 32;
  RingPosition<Tile::kStages> ring;
  int tile = TileOf(0, params.tiles, worker.index, worker.count);
  RowSpan span{};
  if (tile >= 0) span = params.rows[tile % params.row_count];
  const auto columns_of = [&](const RowSpan& of, int first) {
    return first + lane < of.end ? params.panels[first + lane].column : 0;
  };
  int columns = columns_of(span, span.begin);
  const auto ask_for_weights = [&](int p, int stage) {
    CopyBulk(stages + stage * Tile::kStageBytes + Tile::kXBytes,
             params.values + int64_t{p} * Tile::kPanelBytes, Tile::kPanelBytes,
             barriers.Full(stage));
  };
  // Nobody before writes weights: those of the first panels are asked for while the kernel before ends.
  const int asked = min(span.end - span.begin, Tile::kStages);
  if (lane == 0) {
    for (int i = 0; i < asked; ++i) {
      ArriveExpecting(barriers.Full(i), Tile::kStageBytes);
      ask_for_weights(span.begin + i, i);
    }
  }
  int unasked = span.begin + asked;  // panels before it are waited for already
  WaitForPredecessors();
  for (int round = 0; tile >= 0; ++round) {
    const int next_tile = TileOf(round + 1, params.tiles, worker.index, worker.count);
    RowSpan next_span{};
    if (next_tile >= 0)
      next_span = params.rows[next_tile % params.row_count];  // hidden behind this tile
    const int token = params.TokenTile(tile) * Tile::kTileTokens;
    int next_columns = 0;
    for (int p = span.begin; p < span.end; ++p) {
      const int i = (p - span.begin) % 32;
      if (i == 0 && p > span.begin) columns = columns_of(span, p);
      if (p == span.begin) next_columns = columns_of(next_span, next_span.begin);
      const int column = __shfl_sync(0xffffffffu, columns, i);
      if (lane == 0) {
        const uint32_t full = barriers.Full(ring.stage);
        const uint32_t x = stages + ring.stage * Tile::kStageBytes;
        if (p >= unasked) {
          Wait(barriers.Empty(ring.stage), ring.parity ^ 1);
          ArriveExpecting(full, Tile::kStageBytes);
        }
#pragma unroll
        for (int box = 0; box < Tile::kTileTokens; box += kTokens) {
          CopyBox(x + box * kRowBytes, x_map, column, token + box, full);
        }
        if (p >= unasked) ask_for_weights(p, ring.stage);
      }
      __syncwarp();
      ring.Advance();
    }
    if (span.begin == span.end) next_columns = columns_of(next_span, next_span.begin);
    unasked = 0;
    tile = next_tile;
    span = next_span;
    columns = next_columns;
  }
}

template <typename T, Mode kMode, int kTokens, int kResident>
__device__ __forceinline__ void Consume(const CUtensorMap* y_map, const Params<T>& params,
                                        Worker worker, uint32_t stages, uint32_t staging,
                                        RingBarriers barriers) {
  using Tile = Tile<kMode, kTokens, kResident>;
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const bool stores = threadIdx.x % 128 == 0;
  constexpr int kPiece = kTokens < kStagedTokens ? kTokens : kStagedTokens;
  // Which half of the tile is this warpgroup's own.
  const int first_token = kMode == Mode::kSharedWeights ? warpgroup * kTokens : 0;
  const int first_row = kMode == Mode::kSharedX ? warpgroup * 64 : 0;
  const uint32_t x_offset = first_token * kRowBytes,
                 weight_offset = Tile::kXBytes + first_row * kRowBytes;
  RingPosition<Tile::kStages> ring;
  float acc[kTokens / 2];
  // What a tile reads from global memory is asked for a tile (spans) or a main loop (biases, residuals) before it is needed:
  // an answer from L2 takes as long as several products.
  const auto span_of = [&](int tile) {
    return tile < 0 ? RowSpan{} : params.rows[tile % params.row_count];
  };
  int tile = TileOf(0, params.tiles, worker.index, worker.count);
  RowSpan span = span_of(tile);
  WaitForPredecessors();
  for (int round = 0; tile >= 0; ++round) {
    const int next_tile = TileOf(round + 1, params.tiles, worker.index, worker.count);
    const RowSpan next_span = span_of(next_tile);
    const int64_t output = int64_t{span.row} * Tile::kRows + first_row;
    const int64_t biased = output + warp * 16 + lane / 4;
    const float bias[2] = {BiasAt(params.to.bias, biased, params.to.out),
                           BiasAt(params.to.bias, biased + 8, params.to.out)};
    const int token = params.TokenTile(tile) * Tile::kTileTokens + first_token;
    const uint32_t buffer = staging + round % Tile::kBuffers * Tile::kOutputBytes;
    const auto wait_for_buffer = [&] {
      if (stores) WaitStoresRead<Tile::kBuffers - 1>();  // its last store has left it
      SyncThreads(1 + warpgroup, 128);
    };
    if (params.to.residual != nullptr) {
      wait_for_buffer();
      FetchResiduals<T, kTokens>(params.to, output, token, buffer);
    }
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

    if (params.to.residual != nullptr) WaitResiduals();
    wait_for_buffer();
#pragma unroll
    for (int t = 0; t < kTokens; t += kPiece) {
      StageOutputs<T, kPiece>(acc + t / 2, bias, params.to, output + warp * 16,
                              buffer + t * kRowBytes);
    }
    FenceAsyncProxy();
    SyncThreads(1 + warpgroup, 128);
    if (stores) {
      StoreBox(y_map, buffer, static_cast<int>(output), token);
      CommitStores();
    }
    tile = next_tile;
    span = next_span;
  }
  if (stores) WaitStoresRead<0>();
}

template <typename T, Mode kMode, int kTokens, int kResident>
__global__ void __launch_bounds__(kThreads, kResident)
    BlockSlabKernel(const __grid_constant__ CUtensorMap x_map,
                    const __grid_constant__ CUtensorMap y_map, const Params<T> params) {
  using Tile = Tile<kMode, kTokens, kResident>;
  extern __shared__ char shared[];
  const uint32_t rings =
      (SharedAddress(shared) + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
  const uint32_t staging = rings + Tile::kRings * Tile::kRingBytes;
  const uint32_t barriers = staging + 2 * Tile::kBuffers * Tile::kOutputBytes;
  const auto barriers_of = [&](int ring) {
    return RingBarriers{barriers + 16 * Tile::kStages * ring,
                        barriers + 16 * Tile::kStages * ring + 8 * Tile::kStages};
  };
  if (threadIdx.x == 0) {
    for (int r = 0; r < Tile::kRings; ++r)
      InitRing(barriers_of(r), Tile::kStages, kConsumerWarps / Tile::kRings);
    PrefetchMap(&x_map);
    PrefetchMap(&y_map);
  }
  ReleaseSuccessors();
  __syncthreads();
  const auto worker_of = [&](int ring) {
    return Worker{static_cast<int>(blockIdx.x + ring * gridDim.x),
                  static_cast<int>(gridDim.x) * Tile::kRings};
  };
  if (threadIdx.x >= 32 * kConsumerWarps) {
    ShrinkRegisters<kProducerRegisters>();
    const int ring = threadIdx.x / 32 - kConsumerWarps;
    if (ring < Tile::kRings) {
      Produce<T, kMode, kTokens, kResident>(&x_map, params, worker_of(ring),
                                            rings + ring * Tile::kRingBytes, barriers_of(ring));
    }
  } else {
    GrowRegisters<ConsumerRegisters(kResident)>();
    const int warpgroup = threadIdx.x / 128, ring = kMode == Mode::kTwin ? warpgroup : 0;
    Consume<T, kMode, kTokens, kResident>(
        &y_map, params, worker_of(ring), rings + ring * Tile::kRingBytes,
        staging + warpgroup * Tile::kBuffers * Tile::kOutputBytes, barriers_of(ring));
  }
}

template <typename T, Mode kMode, int kTokens, int kResident>
KernelStatus RunShape(const KernelContext& ctx, const LinearArgs& args) {
  using Tile = Tile<kMode, kTokens, kResident>;
  const BlockImage image = BlockImageOf(args.weight);
  CUtensorMap x_map, y_map;
  KernelStatus status = MakeTensorMap(&x_map, args.io_dtype, args.x, args.tokens, args.weight.in,
                                      args.x_stride, kTokens, kPanelColumns);
  if (!status.ok()) return status;
  status = MakeTensorMap(&y_map, args.io_dtype, args.y, args.tokens, args.weight.out, args.y_stride,
                         kTokens, 64);
  if (!status.ok()) return status;
  const char* base = static_cast<const char*>(args.weight.packed);
  const int64_t token_tiles = (args.tokens + Tile::kTileTokens - 1) / Tile::kTileTokens;
  const int64_t tiles = token_tiles * image.block_rows_count;
  if (tiles > INT32_MAX)
    return {KernelCode::kUnsupported, "block slab: too many tiles for one grid"};
  const Params<T> params{reinterpret_cast<const RowSpan*>(base + image.rows_offset),
                         reinterpret_cast<const Panel*>(base + image.panels_offset),
                         base + image.values_offset,
                         static_cast<int32_t>(image.block_rows_count),
                         static_cast<int32_t>(tiles),
                         static_cast<int32_t>(token_tiles - 1),
                         args.weight.out < args.weight.in,
                         OutputOf<T>(args)};
  const int64_t fitting = int64_t{kResident} * MultiprocessorCount();
  const int64_t blocks = tiles < fitting ? tiles : fitting;
  return Launch(ctx, {dim3(static_cast<unsigned>(blocks)), kThreads, Tile::kSharedBytes, 1, true},
                BlockSlabKernel<T, kMode, kTokens, kResident>, x_map, y_map, params);
}

template <Mode kMode, int kTokens, int kResident = 1>
KernelStatus RunMode(const KernelContext& ctx, const LinearArgs& args) {
  return args.io_dtype == DType::kBFloat16
             ? RunShape<BFloat16, kMode, kTokens, kResident>(ctx, args)
             : RunShape<Float16, kMode, kTokens, kResident>(ctx, args);
}

using RunFunction = KernelStatus (*)(const KernelContext&, const LinearArgs&);

// `with_64` and `with_128` run blocks of 64 and 128 rows; null: not a problem for this variant.
KernelStatus Run(const KernelContext& ctx, const LinearArgs& args, RunFunction with_64,
                 RunFunction with_128) {
  const LinearDesc desc = DescOfArgs(args);
  if (!FitsBlockImage(desc) || desc.block_rows < 64 || desc.block_cols < 64) {
    return {KernelCode::kUnsupported, "block slab: needs 2-byte blocks with sides 64 or 128"};
  }
  const RunFunction run = desc.block_rows == 64 ? with_64 : with_128;
  if (run == nullptr)
    return {KernelCode::kUnsupported, "block slab: twin tiles need blocks of 64 rows"};
  if (KernelStatus status = CheckArgs(args); !status.ok() || args.tokens == 0) return status;
  return run(ctx, args);
}

}  // namespace

KernelStatus RunBlockSlabFull(const KernelContext& ctx, const LinearArgs& args) {
  return Run(ctx, args, RunMode<Mode::kSharedWeights, 192>, RunMode<Mode::kSharedX, 256>);
}
KernelStatus RunBlockSlab128(const KernelContext& ctx, const LinearArgs& args) {
  return Run(ctx, args, RunMode<Mode::kSharedWeights, 128>, RunMode<Mode::kSharedX, 128>);
}
KernelStatus RunBlockSlab64(const KernelContext& ctx, const LinearArgs& args) {
  return Run(ctx, args, RunMode<Mode::kSharedWeights, 64>, RunMode<Mode::kSharedX, 64>);
}
KernelStatus RunBlockSlab64Pairs(const KernelContext& ctx, const LinearArgs& args) {
  return Run(ctx, args, RunMode<Mode::kSharedWeights, 64, 2>, RunMode<Mode::kSharedX, 64, 2>);
}
KernelStatus RunBlockTwin16(const KernelContext& ctx, const LinearArgs& args) {
  return Run(ctx, args, RunMode<Mode::kTwin, 16>, RunMode<Mode::kSharedX, 16>);
}
KernelStatus RunBlockTwin256(const KernelContext& ctx, const LinearArgs& args) {
  return Run(ctx, args, RunMode<Mode::kTwin, 256>, nullptr);
}
KernelStatus RunBlockTwin128(const KernelContext& ctx, const LinearArgs& args) {
  return Run(ctx, args, RunMode<Mode::kTwin, 128>, nullptr);
}

}  // namespace espalier::kernels::cuda
