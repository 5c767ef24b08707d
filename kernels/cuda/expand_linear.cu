// expand_linear.cu — csr and diagonal(1) on tensor cores: non-zeros are expanded into dense tiles in shared memory.
//
// For 8 to a few hundred tokens: dense products wait there for 2 bytes a weight from memory, these for 4 bytes a NON-ZERO,
// and the tensor cores have time for the zeros. A thread block has up to five rows of 64×64 tiles, a warpgroup each, all on
// the same x; a cluster shares the columns. A warpgroup walks its row of tiles with three buffers:
//
//   step i   clears the entries of tile i − 2, stores those of tile i, waits for product i − 1, meets (one barrier),
//            starts product i (wgmma, weights as the 64-row operand, K = 64)
//
// Entries come straight from memory into registers, two steps ahead; x through TMA by a warp of its own. In the end each
// thread block of the cluster receives all sums of its share of the tokens and adds them in the order of the columns.
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
constexpr int kBuffers = 3;         // tiles of a warpgroup
constexpr int kPrefetchSteps = 12;  // that the entries' way to L2 is ahead
constexpr int kPrefetchStride = 4;
constexpr int kSharedLimit = 227 * 1024;

// kTokens a tile; kQuads quads a thread holds of a tile: one up to 512 entries, 12.5 %, two up to 25 %. Fuller tiles are
// right, but slower.
template <int kTokens, int kQuads>
struct Tile {
  // As many warps as leave each 80, 96 or 128 registers: the accumulators take kTokens / 2.
  static constexpr int kMostRowTiles = kTokens == 128 ? 3 : kQuads == 1 ? 5 : 4;
  static constexpr int kMostThreads = 128 * kMostRowTiles + 32;
  static constexpr int kStageBytes = kTokens * kRowBytes;
  static constexpr int kStages = kTokens <= 64 ? 6 : 4;
  static constexpr int BufferBytes(int row_tiles) {
    return row_tiles * kBuffers * kExpandTileBytes;
  }
  // Sums of one token lie together; 4 more, so that a warp's fragments fall into different banks.
  static constexpr int SumStride(int row_tiles) { return row_tiles * kExpandSide + 4; }
  static constexpr int SharedBytes(int row_tiles) {
    const int ring = BufferBytes(row_tiles) + kStages * kStageBytes;
    const int sums = kTokens * SumStride(row_tiles) * 4;
    return (ring > sums ? ring : sums) + 16 * kStages + kImageAlignment;
  }
  static_assert(SharedBytes(kMostRowTiles) <= kSharedLimit);
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

// The tiles [first, first + real) of a row of tiles, and what is left of it: walked in order.
class TileWalk {
 public:
  // `tiles` null: a row beyond the last, all tiles empty.
  __device__ __forceinline__ TileWalk(const int32_t* tiles, int real) : tiles_(tiles), real_(real) {
    now_ = Load(0);
    next_ = Load(kChunk);
  }
  // Quads of the next tile: none after the last.
  __device__ __forceinline__ int2 Next() {
    const int begin = __shfl_sync(0xffffffffu, now_, within_);
    const int end = __shfl_sync(0xffffffffu, now_, within_ + 1);
    if (++within_ == kChunk) {
      within_ = 0;
      first_ += kChunk;
      now_ = next_;
      next_ = Load(first_ + kChunk);
    }
    return {begin, end};
  }

 private:
  static constexpr int kChunk = 31;  // a lane has where a tile begins, the next lane where it ends

  __device__ __forceinline__ int Load(int first) const {
    const int index = min(first + static_cast<int>(threadIdx.x % 32), real_);
    return tiles_ == nullptr ? 0 : __ldg(tiles_ + index);
  }

  const int32_t* tiles_;
  int real_, first_ = 0, within_ = 0;
  int now_, next_;
};

// A thread's quads of one tile.
template <int kQuads>
struct Entries {
  uint4 quads[kQuads];
  int begin = 0, count = 0;  // of the whole tile

  __device__ __forceinline__ void Load(const uint4* from, int2 span) {
    begin = span.x;
    count = span.y - span.x;
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
      const int quad = static_cast<int>(threadIdx.x % 128) + 128 * k;
      quads[k] = quad < count ? LoadStreamed(from + begin + quad) : uint4{};
    }
  }
};

// Where a thread stored: two 16-bit bytes of a tile a word.
template <int kQuads>
struct Traces {
  uint32_t pairs[kQuads][2];
  int count = 0;
};

__device__ __forceinline__ void StoreEntries(uint32_t buffer, const uint4& quad) {
  StoreShared16(buffer + (quad.x >> 16), quad.x);
  StoreShared16(buffer + (quad.y >> 16), quad.y);
  StoreShared16(buffer + (quad.z >> 16), quad.z);
  StoreShared16(buffer + (quad.w >> 16), quad.w);
}

template <int kQuads>
__device__ __forceinline__ void Expand(uint32_t buffer, const Entries<kQuads>& entries,
                                       const uint4* quads, Traces<kQuads>* traces) {
  const int thread = threadIdx.x % 128;
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    const uint4& quad = entries.quads[k];
    if (thread + 128 * k < entries.count) StoreEntries(buffer, quad);
    traces->pairs[k][0] = __byte_perm(quad.x, quad.y, 0x7632);
    traces->pairs[k][1] = __byte_perm(quad.z, quad.w, 0x7632);
  }
  for (int i = thread + 128 * kQuads; i < entries.count; i += 128) {
    StoreEntries(buffer, __ldg(quads + entries.begin + i));
  }
  traces->count = entries.count;
}

__device__ __forceinline__ void ClearTile(uint32_t buffer) {
#pragma unroll
  for (int i = 0; i < kExpandTileBytes; i += 128 * 16) {
    StoreShared128(buffer + i + threadIdx.x % 128 * 16, uint4{});
  }
}

template <int kQuads>
__device__ __forceinline__ void Clear(uint32_t buffer, const Traces<kQuads>& traces) {
  if (traces.count > 128 * kQuads) {
    ClearTile(buffer);
    return;
  }
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    if (static_cast<int>(threadIdx.x % 128) + 128 * k >= traces.count) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      StoreShared16(buffer + (traces.pairs[k][i] & 0xffff), 0);
      StoreShared16(buffer + (traces.pairs[k][i] >> 16), 0);
    }
  }
}

// What one thread block computes.
struct Item {
  int rank, token_tile;
  int first_row_tile;
  int first_step, real_steps;  // its columns of tiles
  int steps;                   // even: the last may be beyond the columns

  template <typename T>
  __device__ __forceinline__ explicit Item(const Params<T>& params) {
    rank = static_cast<int>(blockIdx.x) % params.splits;
    const int item = static_cast<int>(blockIdx.x) / params.splits;
    token_tile = item % params.token_tiles;  // thread blocks with the same entries run side by side
    first_row_tile = item / params.token_tiles * params.row_tiles;
    first_step = rank * params.tile_columns / params.splits;
    real_steps = (rank + 1) * params.tile_columns / params.splits - first_step;
    steps = (real_steps + 1) / 2 * 2;
  }

  template <typename T>
  __device__ __forceinline__ const int32_t* TilesOf(const Params<T>& params, int i) const {
    const int row_tile = first_row_tile + i;
    if (i >= params.row_tiles || row_tile >= params.tile_rows) return nullptr;
    return params.tiles + int64_t{row_tile} * params.tile_columns + first_step;
  }
};

template <typename T, int kTokens, int kQuads>
__device__ __forceinline__ void Produce(const CUtensorMap* x_map, const Params<T>& params,
                                        const Item& item, uint32_t stages, RingBarriers barriers) {
  using Tile = Tile<kTokens, kQuads>;
  const int lane = threadIdx.x % 32;
  // A lane a warpgroup brings its entries to L2.
  const int32_t* tiles = item.TilesOf(params, lane);
  const auto prefetch = [&](int first, int last) {
    first = min(first, item.real_steps), last = min(last, item.real_steps);
    if (tiles == nullptr || first >= last) return;
    const int begin = __ldg(tiles + first), end = __ldg(tiles + last);
    if (begin < end) PrefetchBulk(params.quads + begin, (end - begin) * 16);
  };
  prefetch(2, kPrefetchSteps);
  WaitForPredecessors();
  RingPosition<Tile::kStages> ring;
  for (int i = 0; i < item.steps; ++i) {
    if (i % kPrefetchStride == 0) {
      prefetch(i + kPrefetchSteps, i + kPrefetchSteps + kPrefetchStride);
    }
    if (lane == 0) {
      const uint32_t full = barriers.Full(ring.stage);
      Wait(barriers.Empty(ring.stage), ring.parity ^ 1);
      ArriveExpecting(full, Tile::kStageBytes);
      // Beyond the last column of tiles zeros arrive, whatever x holds there.
      const int column = i < item.real_steps ? item.first_step + i : params.tile_columns;
      CopyBox(stages + ring.stage * Tile::kStageBytes, x_map, column * kExpandSide,
              item.token_tile * kTokens, full);
    }
    __syncwarp();
    ring.Advance();
  }
}

template <typename T, int kTokens, int kQuads>
__device__ __forceinline__ void Consume(const Params<T>& params, const Item& item, uint32_t buffers,
                                        uint32_t stages, RingBarriers barriers,
                                        float (&acc)[kTokens / 2]) {
  using Tile = Tile<kTokens, kQuads>;
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  const uint32_t mine = buffers + warpgroup * kBuffers * kExpandTileBytes;
  TileWalk walk(item.TilesOf(params, warpgroup), item.real_steps);
  Entries<kQuads> entries[2];
  Traces<kQuads> traces[2];
  entries[0].Load(params.quads, walk.Next());
  entries[1].Load(params.quads, walk.Next());
  WaitForPredecessors();
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) acc[i] = 0.0f;

  RingPosition<Tile::kStages> ring;
  uint32_t buffer = mine, cleared = mine + kExpandTileBytes;
  int previous = -1;  // stage of the product that is under way
  const auto advance = [&](uint32_t& address) {
    address += kExpandTileBytes;
    if (address == mine + kBuffers * kExpandTileBytes) address = mine;
  };
  const auto step = [&](Entries<kQuads>& now, Traces<kQuads>& before) {
    Clear(cleared, before);
    Expand(buffer, now, params.quads, &before);
    now.Load(params.quads, walk.Next());
    FenceAsyncProxy();
    WaitProducts<0>();
    FenceRegisters(acc);
    if (previous >= 0 && lane == 0) Arrive(barriers.Empty(previous));
    Wait(barriers.Full(ring.stage), ring.parity);
    SyncThreads(1 + warpgroup, 128);
    const Operand<kRowBytes> weight(buffer), x(stages + ring.stage * Tile::kStageBytes);
    FenceRegisters(acc);
    FenceProducts();
#pragma unroll
    for (int k = 0; k < kExpandSide / 16; ++k) {
      Product<T>(acc, weight.At(k * kProductBytes), x.At(k * kProductBytes));
    }
    CommitProducts();
    FenceRegisters(acc);
    previous = ring.stage;
    ring.Advance();
    advance(buffer);
    advance(cleared);
  };
  for (int i = 0; i < item.steps; i += 2) {
    step(entries[0], traces[0]);
    step(entries[1], traces[1]);
  }
  WaitProducts<0>();
  FenceRegisters(acc);
}

// Sends this thread's sums to the thread blocks that have their tokens: [rank][token of the share][row].
template <int kTokens>
__device__ __forceinline__ void SendSums(const float (&acc)[kTokens / 2], int rank, int splits,
                                         int stride, uint32_t sums) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
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
  for (int i = threadIdx.x; i < share * pairs; i += blockDim.x) {
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
    Activate<T>(values, params.to.activation);
    T* at = params.to.y + token * params.to.y_stride + output;
    if (output + 1 < params.to.out) {
      *reinterpret_cast<uint32_t*>(at) = PackPair<T>(values[0], values[1]);
    } else {
      *at = FromFloat<T>(values[0]);
    }
  }
}

template <typename T, int kTokens, int kQuads>
__global__ void __launch_bounds__(Tile<kTokens, kQuads>::kMostThreads, 1)
    ExpandKernel(const __grid_constant__ CUtensorMap x_map, const Params<T> params) {
  using Tile = Tile<kTokens, kQuads>;
  extern __shared__ char dynamic_shared[];
  const uint32_t raw = SharedAddress(dynamic_shared);
  const uint32_t base = (raw + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
  const uint32_t stages = base + Tile::BufferBytes(params.row_tiles);
  const uint32_t after =
      raw + Tile::SharedBytes(params.row_tiles) - 16 * Tile::kStages;  // the last bytes
  const RingBarriers barriers{after, after + 8 * Tile::kStages};
  const int consumers = 128 * params.row_tiles;
  const Item item(params);

  if (threadIdx.x == consumers) {
    InitRing(barriers, Tile::kStages, consumers / 32);
    PrefetchMap(&x_map);
  } else if (threadIdx.x < consumers) {
#pragma unroll
    for (int b = 0; b < kBuffers; ++b) {
      ClearTile(base + (threadIdx.x / 128 * kBuffers + b) * kExpandTileBytes);
    }
  }
  ReleaseSuccessors();
  __syncthreads();
  float acc[kTokens / 2];
  if (threadIdx.x >= consumers) {
    Produce<T, kTokens, kQuads>(&x_map, params, item, stages, barriers);
  } else {
    Consume<T, kTokens, kQuads>(params, item, base, stages, barriers, acc);
  }
  __syncwarp();
  const int stride = Tile::SumStride(params.row_tiles);
  SyncCluster();  // tiles and stages are read everywhere: from here on they hold sums
  if (threadIdx.x < consumers) SendSums<kTokens>(acc, item.rank, params.splits, stride, base);
  SyncCluster();
  StoreShare<T, kTokens>(params, item, stride,
                         reinterpret_cast<const float*>(dynamic_shared + (base - raw)));
}

template <typename T, int kTokens, int kQuads>
KernelStatus RunTile(const KernelContext& ctx, const LinearArgs& args) {
  using Tile = Tile<kTokens, kQuads>;
  const ExpandImage image = ExpandImageOf(args.weight);
  CUtensorMap x_map;
  KernelStatus status = MakeTensorMap(&x_map, args.io_dtype, args.x, args.tokens, args.weight.in,
                                      args.x_stride, kTokens, kExpandSide);
  if (!status.ok()) return status;
  const ExpandCut cut =
      CutExpandTiles(image, args.tokens, kTokens, Tile::kMostRowTiles, MultiprocessorCount());
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
  return Launch(ctx,
                {dim3(static_cast<unsigned>(grid)), 128 * cut.row_tiles + 32,
                 static_cast<size_t>(Tile::SharedBytes(cut.row_tiles)), cut.splits, true},
                ExpandKernel<T, kTokens, kQuads>, x_map, params);
}

template <typename T, int kQuads>
KernelStatus RunTokens(const KernelContext& ctx, const LinearArgs& args) {
  if (args.tokens <= 16) return RunTile<T, 16, kQuads>(ctx, args);
  if (args.tokens <= 32) return RunTile<T, 32, kQuads>(ctx, args);
  if (args.tokens <= 64) return RunTile<T, 64, kQuads>(ctx, args);
  return RunTile<T, 128, kQuads>(ctx, args);
}

template <typename T>
KernelStatus RunTyped(const KernelContext& ctx, const LinearArgs& args) {
  // Of 512 entries that one quad a thread holds, 15 % are left for tiles fuller than the mean.
  const WeightView& w = args.weight;
  const double stored = static_cast<double>(w.count) *
                        static_cast<double>(w.layout == Layout::kCsr ? 1 : w.diagonal_length());
  const double mean =
      stored / static_cast<double>(w.out) / static_cast<double>(w.in) * (kExpandSide * kExpandSide);
  return mean <= 440 ? RunTokens<T, 1>(ctx, args) : RunTokens<T, 2>(ctx, args);
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
