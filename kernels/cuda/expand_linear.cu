// expand_linear.cu — csr and diagonal(1) on tensor cores: non-zeros are expanded into dense tiles in shared memory.
//
// For 8 to a few hundred tokens: dense products wait there for 2 bytes a weight from memory, these for 4 bytes a NON-ZERO,
// and the tensor cores have time for the zeros. A thread block has up to six rows of 64×64 tiles, all on the same x; a
// cluster shares the columns. Three kinds of warps, joined by barriers in shared memory:
//
//   expanders   each takes every W-th tile, in one or two slots of its own: waits until the slot's last product is done,
//               clears the entries it stored there, stores the new ones
//   multipliers warpgroups with one or more rows of tiles each: wgmma, weights as the 64-row operand
//   producer    x through TMA, and the entries' way to L2
//
// A tile costs 64 clocks of shared memory for its operand, 16 for every 16 tokens of x and about 50 for its entries; what a
// single warp waits for — entries, the fence before an asynchronous read, a barrier — is many times that, hence one tile a
// warp: with a tile a warpgroup instead, in step with its own products, a tile took 310 clocks (H200, 16 tokens).
// In the end each thread block of the cluster receives all sums of its share of the tokens and adds them in the order of the
// columns.
//
// As in a dense product, 0 · x counts: a token with an infinity or a NaN anywhere makes NaN everywhere.
#include "kernels/cuda/block_image.h"
#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/pipeline.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/expand_image.h"
#include "kernels/cuda/kernels.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kRowBytes = kExpandSide * 2;
constexpr int kHeldQuads =
    4;  // quads a lane holds: 512 entries, 12.5 % of a tile; fuller tiles take a second look
constexpr int kPrefetchSteps = 12;  // that the entries' way to L2 is ahead
constexpr int kPrefetchStride = 4;
constexpr int kSharedLimit = 227 * 1024;

template <int kTokens>
struct Tile {
  static constexpr int kMultipliers = kTokens == 128 ? 3 : 2;  // warpgroups
  static constexpr int kRowsEach =
      kTokens == 128 ? 1 : 3;  // rows of tiles a multiplier: accumulators
  static constexpr int kMostRowTiles = kMultipliers * kRowsEach;
  // Warpgroups of expanders, the last warp the producer: as many as the multipliers' registers leave room for.
  static constexpr int kHelpers = kTokens == 128 ? 2 : kTokens == 64 ? 4 : 6;
  static constexpr int kExpanders = 4 * kHelpers - 1;  // warps
  static constexpr int kThreads = 128 * (kMultipliers + kHelpers);
  // All together at most what the launch gives: 640 · 96, 768 · 80 or 1024 · 64.
  static constexpr int kMultiplierRegisters = kTokens == 128 ? 112 : kTokens == 64 ? 128 : 96;
  static constexpr int kHelperRegisters = kTokens == 128 ? 72 : kTokens == 64 ? 56 : 48;
  static constexpr int kSlotsEach = kTokens == 128 ? 2 : 1;
  static constexpr int kSlots = kSlotsEach * kExpanders;
  static constexpr int kStageBytes = kTokens * kRowBytes;
  static constexpr int kStages = kTokens < 64 ? 8 : 6;
  static constexpr int kStagesOffset = kSlots * kExpandTileBytes;
  static constexpr int kBarriersOffset = kStagesOffset + kStages * kStageBytes;
  static constexpr int kSharedBytes = kBarriersOffset + 16 * (kSlots + kStages) + kImageAlignment;
  // Sums of one token lie together; 4 more, so that a warp's fragments fall into different banks.
  static constexpr int SumStride(int row_tiles) { return row_tiles * kExpandSide + 4; }
  // Stages of x in use. A multiplier may be ahead of another by fewer steps than there are stages; in these it must not come
  // round to a slot that the other's tile still has to fill, whose barrier would seem to be a round further.
  __host__ __device__ static constexpr int Stages(int row_tiles) {
    return kSlots / row_tiles < kStages ? kSlots / row_tiles : kStages;
  }
  static_assert(kTokens * SumStride(kMostRowTiles) * 4 <= kBarriersOffset);
  static_assert(kSharedBytes <= kSharedLimit);
};

template <typename T>
struct Params {
  const int32_t* tiles;
  const uint4* quads;
  int32_t tile_rows, tile_columns;  // of the image
  int32_t row_tiles, splits;        // of the cut
  int32_t token_tiles;
  LinearOutput<T> to;
};

// What one thread block computes.
struct Item {
  int rank, token_tile;
  int first_row_tile;
  int first_step, steps;  // its columns of tiles

  template <typename T>
  __device__ __forceinline__ explicit Item(const Params<T>& params) {
    rank = static_cast<int>(blockIdx.x) % params.splits;
    const int item = static_cast<int>(blockIdx.x) / params.splits;
    token_tile = item % params.token_tiles;  // thread blocks with the same entries run side by side
    first_row_tile = item / params.token_tiles * params.row_tiles;
    first_step = rank * params.tile_columns / params.splits;
    steps = (rank + 1) * params.tile_columns / params.splits - first_step;
  }

  // Where the quads of the tiles of row r begin, step by step; null for a row beyond the last.
  template <typename T>
  __device__ __forceinline__ const int32_t* TilesOf(const Params<T>& params, int r) const {
    const int row_tile = first_row_tile + r;
    if (r >= params.row_tiles || row_tile >= params.tile_rows) return nullptr;
    return params.tiles + int64_t{row_tile} * params.tile_columns + first_step;
  }
};

struct Barriers {
  RingBarriers slots, stages;
};

// What an expander stored in a slot: two bytes of the tile a word.
struct Traces {
  uint32_t pairs[kHeldQuads][2];
  int count = INT32_MAX;  // quads; at first the slot holds anything
};

__device__ __forceinline__ void StoreEntries(uint32_t slot, const uint4& quad) {
  StoreShared16(slot + (quad.x >> 16), quad.x);
  StoreShared16(slot + (quad.y >> 16), quad.y);
  StoreShared16(slot + (quad.z >> 16), quad.z);
  StoreShared16(slot + (quad.w >> 16), quad.w);
}

__device__ __forceinline__ void Clear(uint32_t slot, const Traces& traces) {
  const int lane = threadIdx.x % 32;
  if (traces.count > 32 * kHeldQuads) {
#pragma unroll 4
    for (int i = lane * 16; i < kExpandTileBytes; i += 32 * 16) StoreShared128(slot + i, uint4{});
    return;
  }
#pragma unroll
  for (int k = 0; k < kHeldQuads; ++k) {
    if (lane + 32 * k >= traces.count) break;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      StoreShared16(slot + (traces.pairs[k][i] & 0xffff), 0);
      StoreShared16(slot + (traces.pairs[k][i] >> 16), 0);
    }
  }
}

template <typename T, int kTokens>
class Expander {
 public:
  __device__ __forceinline__ Expander(const Params<T>& params, const Item& item, int warp,
                                      uint32_t slots, RingBarriers barriers)
      : params_(params), item_(item), slots_(slots), barriers_(barriers) {
    step_ = warp / params.row_tiles;
    row_ = warp % params.row_tiles;
    span_ = Span();
  }

  __device__ __forceinline__ void Run(int warp) {
    constexpr int kSlotsEach = Tile<kTokens>::kSlotsEach;
    const int tiles = item_.steps * params_.row_tiles;
    Traces traces[kSlotsEach];
    uint32_t parity = 1;  // a fresh barrier has completed it
    for (int i = warp; i < tiles; i += kSlotsEach * kExpanders, parity ^= 1) {
#pragma unroll
      for (int s = 0; s < kSlotsEach; ++s) {
        if (i + s * kExpanders < tiles) ExpandNext(warp + s * kExpanders, parity, &traces[s]);
      }
    }
  }

 private:
  static constexpr int kExpanders = Tile<kTokens>::kExpanders;

  // Quads of the tile at (step_, row_).
  __device__ __forceinline__ int2 Span() const {
    const int32_t* tiles = item_.TilesOf(params_, row_);
    if (tiles == nullptr || step_ >= item_.steps) return {0, 0};
    return {__ldg(tiles + step_), __ldg(tiles + step_ + 1)};
  }

  __device__ __forceinline__ void ExpandNext(int slot_index, uint32_t parity, Traces* traces) {
    const int lane = threadIdx.x % 32, begin = span_.x, count = span_.y - span_.x;
    uint4 quads[kHeldQuads];
#pragma unroll
    for (int k = 0; k < kHeldQuads; ++k) {
      quads[k] =
          lane + 32 * k < count ? LoadStreamed(params_.quads + begin + lane + 32 * k) : uint4{};
    }
    step_ += kExpanders / params_.row_tiles;
    row_ += kExpanders % params_.row_tiles;
    if (row_ >= params_.row_tiles) row_ -= params_.row_tiles, ++step_;
    span_ = Span();

    Wait(barriers_.Empty(slot_index), parity);
    const uint32_t slot = slots_ + slot_index * kExpandTileBytes;
    Clear(slot, *traces);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kHeldQuads; ++k) {
      if (lane + 32 * k < count) StoreEntries(slot, quads[k]);
      traces->pairs[k][0] = __byte_perm(quads[k].x, quads[k].y, 0x7632);
      traces->pairs[k][1] = __byte_perm(quads[k].z, quads[k].w, 0x7632);
    }
    for (int i = lane + 32 * kHeldQuads; i < count; i += 32) {
      StoreEntries(slot, LoadStreamed(params_.quads + begin + i));
    }
    traces->count = count;
    FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) Arrive(barriers_.Full(slot_index));
  }

  const Params<T>& params_;
  const Item& item_;
  uint32_t slots_;
  RingBarriers barriers_;
  int step_, row_;
  int2 span_;
};

template <typename T, int kTokens>
__device__ __forceinline__ void Produce(const CUtensorMap* x_map, const Params<T>& params,
                                        const Item& item, uint32_t stages, RingBarriers barriers) {
  using Tile = Tile<kTokens>;
  const int lane = threadIdx.x % 32;
  // A lane a row of tiles brings its entries to L2.
  const int32_t* tiles = item.TilesOf(params, lane);
  const auto prefetch = [&](int first, int last) {
    first = min(first, item.steps), last = min(last, item.steps);
    if (tiles == nullptr || first >= last) return;
    const int begin = __ldg(tiles + first), end = __ldg(tiles + last);
    if (begin < end) PrefetchBulk(params.quads + begin, (end - begin) * 16);
  };
  prefetch(1, kPrefetchSteps);
  WaitForPredecessors();
  const int in_use = Tile::Stages(params.row_tiles);
  RingPosition<Tile::kStages> ring;
  for (int i = 0; i < item.steps; ++i) {
    if (i % kPrefetchStride == 0) {
      prefetch(i + kPrefetchSteps, i + kPrefetchSteps + kPrefetchStride);
    }
    if (lane == 0) {
      const uint32_t full = barriers.Full(ring.stage);
      Wait(barriers.Empty(ring.stage), ring.parity ^ 1);
      ArriveExpecting(full, Tile::kStageBytes);
      CopyBox(stages + ring.stage * Tile::kStageBytes, x_map, (item.first_step + i) * kExpandSide,
              item.token_tile * kTokens, full);
    }
    __syncwarp();
    ring.Advance(in_use);
  }
}

// acc[j] = products of row of tiles warpgroup + j · kMultipliers.
template <typename T, int kTokens, int kOwn>
__device__ __forceinline__ void Multiply(const Params<T>& params, const Item& item, uint32_t base,
                                         const Barriers& barriers,
                                         float (&acc)[kOwn][kTokens / 2]) {
  using Tile = Tile<kTokens>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) acc[j][i] = 0.0f;
  }
  const int in_use = Tile::Stages(params.row_tiles);
  RingPosition<Tile::kStages> ring;
  int slot = threadIdx.x / 128, previous = -1, previous_stage = -1;
  uint32_t parity = 0;
  for (int step = 0; step < item.steps; ++step) {
    Wait(barriers.stages.Full(ring.stage), ring.parity);
    const Operand<kRowBytes> x(base + Tile::kStagesOffset + ring.stage * Tile::kStageBytes);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      Wait(barriers.slots.Full(slot), parity);
      const Operand<kRowBytes> weight(base + slot * kExpandTileBytes);
      FenceRegisters(acc[j]);
      FenceProducts();
#pragma unroll
      for (int k = 0; k < kExpandSide / 16; ++k) {
        Product<T>(acc[j], weight.At(k * kProductBytes), x.At(k * kProductBytes));
      }
      CommitProducts();
      FenceRegisters(acc[j]);
      if (previous >= 0) {
        WaitProducts<1>();
        if (lane == 0) {
          Arrive(barriers.slots.Empty(previous));
          if (j == 0) Arrive(barriers.stages.Empty(previous_stage));
        }
      }
      previous = slot;
      slot +=
          j + 1 < kOwn ? Tile::kMultipliers : params.row_tiles - (kOwn - 1) * Tile::kMultipliers;
      if (slot >= Tile::kSlots) slot -= Tile::kSlots, parity ^= 1;
    }
    previous_stage = ring.stage;
    ring.Advance(in_use);
  }
  WaitProducts<0>();
#pragma unroll
  for (int j = 0; j < kOwn; ++j) FenceRegisters(acc[j]);
}

// Sends this thread's sums to the thread blocks that have their tokens: [rank][token of the share][row].
template <int kTokens>
__device__ __forceinline__ void SendSums(const float (&acc)[kTokens / 2], int row_tile, int rank,
                                         int splits, int stride, uint32_t sums) {
  const int lane = threadIdx.x % 32;
  const int row = row_tile * kExpandSide + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int share = kTokens / splits;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    const int token = 8 * j + 2 * (lane % 4);
    const int slot = rank * share + token % share;
    const uint32_t to = ClusterAddress(sums + (slot * stride + row) * 4, token / share);
    StoreToCluster(to, acc[4 * j]);
    StoreToCluster(to + stride * 4, acc[4 * j + 1]);
    StoreToCluster(to + 32, acc[4 * j + 2]);
    StoreToCluster(to + stride * 4 + 32, acc[4 * j + 3]);
  }
}

// Adds up what the cluster sent and stores this thread block's share of the tokens, two neighbouring outputs a thread.
template <typename T, int kTokens>
__device__ __forceinline__ void StoreShare(const Params<T>& params, const Item& item, int stride,
                                           const float* sums) {
  const int share = kTokens / params.splits, pairs = params.row_tiles * kExpandSide / 2;
  const int64_t first_output = int64_t{item.first_row_tile} * kExpandSide;
  const int64_t first_token = int64_t{item.token_tile} * kTokens + item.rank * share;
  for (int i = threadIdx.x; i < share * pairs; i += 128 * Tile<kTokens>::kMultipliers) {
    const int t = i / pairs, pair = i % pairs;
    const int64_t output = first_output + 2 * pair, token = first_token + t;
    if (token >= params.to.tokens || output >= params.to.out) continue;
    float values[2] = {};
    for (int s = 0; s < params.splits; ++s) {
      const float2 part =
          *reinterpret_cast<const float2*>(sums + (s * share + t) * stride + 2 * pair);
      values[0] += part.x;
      values[1] += part.y;
    }
    values[0] += BiasAt(params.to.bias, output, params.to.out);
    values[1] += BiasAt(params.to.bias, output + 1, params.to.out);
    if (params.to.residual != nullptr) {
      const float2 residual = ResidualPair(params.to, token, output);
      values[0] += residual.x;
      values[1] += residual.y;
    }
    Activate<T>(values, params.to.activation);
    T* at = params.to.y + token * params.to.y_stride + output;
    if (output + 1 < params.to.out) {
      *reinterpret_cast<uint32_t*>(at) = PackPair<T>(values[0], values[1]);
    } else {
      *at = FromFloat<T>(values[0]);
    }
  }
}

// A multiplier with kOwn rows of tiles, from its first product to the outputs.
template <typename T, int kTokens, int kOwn>
__device__ __forceinline__ void RunMultiplier(const Params<T>& params, const Item& item,
                                              uint32_t base, const Barriers& barriers) {
  using Tile = Tile<kTokens>;
  float acc[kOwn < 1 ? 1 : kOwn][kTokens / 2];
  if constexpr (kOwn > 0) Multiply<T, kTokens, kOwn>(params, item, base, barriers, acc);
  SyncCluster();  // slots and stages are read everywhere: from here on they hold sums
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    SendSums<kTokens>(acc[j], threadIdx.x / 128 + j * Tile::kMultipliers, item.rank, params.splits,
                      Tile::SumStride(params.row_tiles), base);
  }
  SyncCluster();
}

template <typename T, int kTokens>
__global__ void __launch_bounds__(Tile<kTokens>::kThreads, 1)
    ExpandKernel(const __grid_constant__ CUtensorMap x_map, const Params<T> params) {
  using Tile = Tile<kTokens>;
  extern __shared__ char dynamic_shared[];
  const uint32_t raw = SharedAddress(dynamic_shared);
  const uint32_t base = (raw + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
  const uint32_t first = base + Tile::kBarriersOffset;
  const Barriers barriers{
      {first, first + 8 * Tile::kSlots},
      {first + 16 * Tile::kSlots, first + 16 * Tile::kSlots + 8 * Tile::kStages}};
  const Item item(params);
  constexpr int kMultiplierThreads = 128 * Tile::kMultipliers;

  if (threadIdx.x == 0) {
    InitRing(barriers.slots, Tile::kSlots, 4);
    InitRing(barriers.stages, Tile::kStages, 4 * min(params.row_tiles, Tile::kMultipliers));
    PrefetchMap(&x_map);
  }
  ReleaseSuccessors();
  __syncthreads();
  if (threadIdx.x >= kMultiplierThreads) {
    ShrinkRegisters<Tile::kHelperRegisters>();
    const int warp = (threadIdx.x - kMultiplierThreads) / 32;
    if (warp == Tile::kExpanders) {
      Produce<T, kTokens>(&x_map, params, item, base + Tile::kStagesOffset, barriers.stages);
    } else {
      Expander<T, kTokens>(params, item, warp, base, barriers.slots).Run(warp);
    }
    __syncwarp();
    SyncCluster();
    SyncCluster();
  } else {
    GrowRegisters<Tile::kMultiplierRegisters>();
    WaitForPredecessors();
    const int warpgroup = threadIdx.x / 128;
    const int own = (params.row_tiles - warpgroup + Tile::kMultipliers - 1) / Tile::kMultipliers;
    if (own <= 0) {
      RunMultiplier<T, kTokens, 0>(params, item, base, barriers);
    } else if (own == 1 || Tile::kRowsEach == 1) {
      RunMultiplier<T, kTokens, 1>(params, item, base, barriers);
    } else if (own == 2) {
      RunMultiplier<T, kTokens, Tile::kRowsEach == 1 ? 1 : 2>(params, item, base, barriers);
    } else {
      RunMultiplier<T, kTokens, Tile::kRowsEach>(params, item, base, barriers);
    }
    StoreShare<T, kTokens>(params, item, Tile::SumStride(params.row_tiles),
                           reinterpret_cast<const float*>(dynamic_shared + (base - raw)));
  }
}

template <typename T, int kTokens>
KernelStatus RunTile(const KernelContext& ctx, const LinearArgs& args) {
  using Tile = Tile<kTokens>;
  const ExpandImage image = ExpandImageOf(args.weight);
  CUtensorMap x_map;
  KernelStatus status = MakeTensorMap(&x_map, args.io_dtype, args.x, args.tokens, args.weight.in,
                                      args.x_stride, kTokens, kExpandSide);
  if (!status.ok()) return status;
  ExpandClusters clusters;  // of one kernel for all numbers of tokens: they must be split alike
  for (size_t i = 0; i < clusters.active.size(); ++i) {
    using Fixed = ::espalier::kernels::cuda::Tile<64>;
    status = ActiveClusters(reinterpret_cast<const void*>(ExpandKernel<T, 64>), 1 << i,
                            Fixed::kThreads, Fixed::kSharedBytes, &clusters.active[i]);
    if (!status.ok()) return status;
  }
  const ExpandCut cut = CutExpandTiles(image, args.tokens, kTokens, Tile::kMostRowTiles, clusters);
  const int64_t token_tiles = (args.tokens + kTokens - 1) / kTokens;
  const int64_t groups = (image.row_tiles + cut.row_tiles - 1) / cut.row_tiles;
  const int64_t grid = groups * token_tiles * cut.splits;
  if (grid > INT32_MAX) return {KernelCode::kUnsupported, "expand: too many tiles for one grid"};
  const char* base = static_cast<const char*>(args.weight.packed);
  const Params<T> params{reinterpret_cast<const int32_t*>(base),
                         reinterpret_cast<const uint4*>(base + image.quads_offset),
                         static_cast<int32_t>(image.row_tiles),
                         static_cast<int32_t>(image.column_tiles),
                         cut.row_tiles,
                         cut.splits,
                         static_cast<int32_t>(token_tiles),
                         OutputOf<T>(args)};
  return Launch(
      ctx,
      {dim3(static_cast<unsigned>(grid)), Tile::kThreads, Tile::kSharedBytes, cut.splits, true},
      ExpandKernel<T, kTokens>, x_map, params);
}

template <typename T>
KernelStatus RunTyped(const KernelContext& ctx, const LinearArgs& args) {
  if (args.tokens <= 16) return RunTile<T, 16>(ctx, args);
  if (args.tokens <= 32) return RunTile<T, 32>(ctx, args);
  if (args.tokens <= 64) return RunTile<T, 64>(ctx, args);
  return RunTile<T, 128>(ctx, args);
}

}  // namespace

KernelStatus RunExpandTiles(const KernelContext& ctx, const LinearArgs& args) {
  if (!FitsExpandImage(DescOfArgs(args))) {
    return {KernelCode::kUnsupported, "expand: needs 2-byte csr or diagonal(1)"};
  }
  if (KernelStatus status = CheckArgs(args); !status.ok() || args.tokens == 0) return status;
  return args.io_dtype == DType::kBFloat16 ? RunTyped<BFloat16>(ctx, args)
                                           : RunTyped<Float16>(ctx, args);
}

}  // namespace espalier::kernels::cuda
