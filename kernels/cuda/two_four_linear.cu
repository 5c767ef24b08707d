// two_four_linear.cu — csr and diagonal(1) at many tokens on sparse tensor cores: TMA-fed wgmma, weights as the operand.
//
// Clusters of two persistent thread blocks, each of two producer warps and two consumer warpgroups. A cluster's tile is a
// group of 256 rows times 256 tokens, 64 rows a warpgroup; tiles of a last round that is less than half full are cut in
// two. Each thread block loads half the tokens of a slab of x for both, and its own pieces of the weight
// (two_four_image.h); a warpgroup multiplies a piece of 32 columns with one sparse instruction, with two dense ones, or
// not at all.
//
// What bounds it in the end is shared memory, 128 bytes a clock: for 64 columns a thread block writes 32 KiB of x and about
// 9 of weights, and its warpgroups read 64 of x and 8 of weights: 883 clocks, of which sparse tensor cores need 512 (dense
// ones 1,024). Without clusters L2 would come first, at 11 TB/s. But 512 clocks are also short for everything that warps do
// beside the products. H200, 4,096³, 90 %: with one producer warp, addresses computed where they are used and every panel
// looked at after the one before, 183 µs; with the next panel looked at meanwhile, addresses kept and stages that the
// compiler knows, the producer alone was too slow; with two, 153 µs (cuBLASLt beside it: 196–207).
//
// As in a dense product, 0 · x counts: a token with an infinity or a NaN anywhere may make NaN anywhere.
#include "kernels/cuda/block_image.h"
#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/pipeline.cuh"
#include "kernels/cuda/device/staging.cuh"
#include "kernels/cuda/device/tile_walk.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/two_four_image.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kTokens = 256;  // of a whole tile
constexpr int kCluster = 2;
constexpr int kBoxTokens = kTokens / kCluster;
constexpr uint16_t kBoth = 3;  // thread blocks 0 and 1 of a cluster
constexpr int kRowBytes = kTwoFourPanelColumns * 2;
constexpr int kXBytes = kTokens * kRowBytes;
constexpr int kRowsBytes = 2 * kDensePieceBytes;  // pieces of 64 rows, at most
constexpr int kStageBytes = kXBytes + 2 * kRowsBytes;
constexpr int kStages = 4;
constexpr int kConsumerWarps = 8;
constexpr int kThreads =
    32 * (kConsumerWarps + 4);  // the producer's warpgroup exists to give its registers away
// 128 · 56 + 256 · 224 = 384 · 168, what a thread block of 384 threads is launched with.
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;
constexpr int kBuffers = 2;  // for outputs, a warpgroup: one drains while the other is written
constexpr int kBufferBytes = kStagedTokens * kStagedRowBytes;
constexpr int kStagingOffset = kStages * kStageBytes;
constexpr int kBarriersOffset = kStagingOffset + 2 * kBuffers * kBufferBytes;
constexpr int kPlacesOffset = kBarriersOffset + 24 * kStages;
constexpr int kSharedBytes = kPlacesOffset + 4 * kStages + kImageAlignment;
static_assert(kSharedBytes <= 227 * 1024);
// Token tiles that are walked together: 66 clusters then share about 8 tiles of x and 8 groups of weights in L2.
constexpr int kBand = 8;

template <typename T>
struct Params {
  const int32_t* groups;
  const uint4* panels;  // TwoFourPanel
  const char* pieces;
  int32_t group_count, token_tiles;
  int32_t whole, tiles;  // tiles: the first `whole` are, the rest are halves
  LinearOutput<T> to;
};

// A value that the compiler cannot compute again: from special registers, in every round of the inner loop, that took
// longer than the products.
__device__ __forceinline__ uint32_t Kept(uint32_t value) {
  return __shfl_sync(0xffffffffu, value, threadIdx.x % 32);
}

// Shared-memory addresses; the same in both thread blocks, which multicasts rely on.
struct Shared {
  uint32_t base;

  __device__ __forceinline__ uint32_t Stage(int stage) const { return base + stage * kStageBytes; }
  __device__ __forceinline__ RingBarriers Barriers() const {
    return {base + kBarriersOffset, base + kBarriersOffset + 8 * kStages};
  }
  // Every consuming thread has read its own thread block's part of a stage, so that weights may be replaced; a stage is
  // empty when that is so in both thread blocks, for which one lane a warp vouches.
  __device__ __forceinline__ uint32_t Read(int stage) const {
    return base + kBarriersOffset + 16 * kStages + 8 * stage;
  }
  // TwoFourPanel::pieces of the panel in a stage.
  __device__ __forceinline__ uint32_t Places(int stage) const {
    return base + kPlacesOffset + 4 * stage;
  }
};

// What a cluster computes in one round; nothing for tile -1.
struct Item {
  int group = 0, token = 0, tokens = kTokens;
  int begin = 0, end = 0;  // panels

  template <typename T>
  __device__ __forceinline__ Item(const Params<T>& params, int tile) {
    if (tile < 0) return;
    if (tile >= params.whole) {
      const int half = tile - params.whole;
      tokens = kTokens / 2;
      token = half % 2 * tokens;
      tile = params.whole + half / 2;
    }
    const int band = tile / (kBand * params.group_count);
    const int width = min(kBand, params.token_tiles - band * kBand);
    const int within = tile - band * kBand * params.group_count;
    group = within / width;
    token += (band * kBand + within % width) * kTokens;
    begin = __ldg(params.groups + group);
    end = __ldg(params.groups + group + 1);
  }
};

template <typename T>
__device__ __forceinline__ int ClusterTile(const Params<T>& params, int round) {
  return TileOf(round, params.tiles, blockIdx.x / kCluster, gridDim.x / kCluster);
}

// Panels of an item in steps of the ring: an item begins at stage 0, the last round is filled up with empty steps.
__device__ __forceinline__ int Steps(const Item& item) {
  return (item.end - item.begin + kStages - 1) / kStages * kStages;
}

// Calls fill(item, step, stage, parity of the ring, 32 panels, a lane each) for every step of this cluster. (Bringing
// panels to L2 16 to 48 steps before made everything 3 to 8 % slower on an H200.)
template <typename T, typename Fill>
__device__ __forceinline__ void ForEachStep(const Params<T>& params, Fill fill) {
  const int lane = threadIdx.x % 32, rank = static_cast<int>(ClusterRank());
  const auto panel_of = [&](const Item& item, int first) {
    return first + lane < item.end ? __ldg(params.panels + 2 * (first + lane) + rank) : uint4{};
  };
  uint32_t parity = 0;
  int tile = ClusterTile(params, 0);
  Item item(params, tile);
  uint4 next = panel_of(item, item.begin);
  for (int round = 0; tile >= 0; ++round) {
    const int next_tile = ClusterTile(params, round + 1);
    const Item next_item(params, next_tile);
    const int steps = Steps(item);
    uint4 panels{};
    for (int step = 0; step < steps; step += kStages, parity ^= 1) {
      if (step % 32 == 0) {
        panels = next;
        const int batch = item.begin + step + 32;
        next = batch < item.end ? panel_of(item, batch) : panel_of(next_item, next_item.begin);
      }
#pragma unroll
      for (int s = 0; s < kStages; ++s) fill(item, step + s, s, parity, panels);
    }
    if (steps == 0) next = panel_of(next_item, next_item.begin);
    tile = next_tile;
    item = next_item;
  }
}

// Two producing warps, since one took longer than the products: x, half of it for both thread blocks, ...
template <typename T>
__device__ __forceinline__ void ProduceX(const CUtensorMap* x_map, const Params<T>& params,
                                         const Shared& shared) {
  const int rank = static_cast<int>(ClusterRank());
  WaitForPredecessors();
  const auto fill = [&](const Item& item, int step, int stage, uint32_t parity,
                        const uint4& panels) {
    const int column = static_cast<int>(__shfl_sync(0xffffffffu, panels.x, step % 32));
    if (threadIdx.x % 32 == 0) {
      const uint32_t full = shared.Barriers().Full(stage), x = shared.Stage(stage);
      const bool is_filling = item.begin + step >= item.end;
      Wait(shared.Barriers().Empty(stage), parity ^ 1);  // in both thread blocks
      ArriveExpecting(full, is_filling ? 0 : item.tokens * kRowBytes);
      if (!is_filling && item.tokens == kTokens) {
        CopyBoxToCluster(x + rank * kBoxTokens * kRowBytes, x_map, column,
                         item.token + rank * kBoxTokens, full, kBoth);
      } else if (!is_filling && stage % kCluster == rank) {
        CopyBoxToCluster(x, x_map, column, item.token, full, kBoth);
      }
    }
    __syncwarp();
  };
  ForEachStep(params, fill);
}

// ... and weights, which no predecessor writes.
template <typename T>
__device__ __forceinline__ void ProduceWeights(const Params<T>& params, const Shared& shared) {
  ForEachStep(params, [&](const Item&, int step, int stage, uint32_t parity, const uint4& panels) {
    const uint32_t begin = __shfl_sync(0xffffffffu, panels.y, step % 32),
                   sizes = __shfl_sync(0xffffffffu, panels.z, step % 32),
                   places = __shfl_sync(0xffffffffu, panels.w, step % 32);
    if (threadIdx.x % 32 == 0) {
      const uint32_t full = shared.Barriers().Full(stage), to = shared.Stage(stage) + kXBytes;
      const uint32_t first = (sizes & 0xffff) * kPieceUnit, second = (sizes >> 16) * kPieceUnit;
      const char* pieces = params.pieces + int64_t{begin} * kPieceUnit;
      Wait(shared.Read(stage), parity ^ 1);
      StoreShared32(shared.Places(stage), places);
      ArriveExpecting(full, first + second);
      if (first > 0) CopyBulk(to, pieces, first, full);
      if (second > 0) CopyBulk(to + kRowsBytes, pieces + first, second, full);
    }
    __syncwarp();
  });
}

// What a consumer needs in every round, of stage 0.
struct Consumer {
  Shared shared;
  uint32_t pieces;    // its warpgroup's
  uint32_t places;    // where the slots of the pieces are
  uint32_t metadata;  // this lane's word of the first piece, if it is sparse
  uint32_t empty;     // lanes below kCluster: that thread block's barrier; 0: other lanes

  __device__ __forceinline__ explicit Consumer(const Shared& shared) : shared(shared) {
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    pieces = Kept(shared.base + kXBytes + warpgroup * kRowsBytes);
    places = Kept(shared.Places(0) + warpgroup * 2);
    metadata = Kept(shared.base + kXBytes + warpgroup * kRowsBytes + kSparseValuesBytes +
                    4 * (16 * warp + lane / 4 * 2 + lane % 2));
    empty = Kept(lane < kCluster ? ClusterAddress(shared.Barriers().Empty(0), lane) : 0);
  }
};

// A warpgroup's two pieces of the panel in a stage.
struct Pieces {
  // The same in all lanes, which the compiler has to see: it would serialise products in divergent branches.
  bool are_sparse;    // both
  uint32_t place[2];  // unless they are
  uint32_t metadata[2];

  __device__ __forceinline__ void Load(const Consumer& consumer, int stage) {
    const uint32_t places = LoadShared16(consumer.places + 4 * stage);
    const uint32_t word = consumer.metadata + stage * kStageBytes;
    metadata[0] = LoadShared32(word);
    metadata[1] = LoadShared32(word + kSparsePieceBytes);
    are_sparse = __all_sync(0xffffffffu, places == kSparsePair);
    if (are_sparse) return;
    const uint32_t shared_places = __shfl_sync(0xffffffffu, places, 0);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      place[j] = shared_places >> 8 * j & 255;
      metadata[j] = 0;
      if (place[j] & kSparsePiece)
        metadata[j] = LoadShared32(word + (place[j] & kPieceOffsetMask) * kPieceUnit);
    }
  }

  // Enqueues the products with the slab in `stage`.
  template <typename T, int kCount>
  __device__ __forceinline__ void Multiply(const Consumer& consumer, int stage,
                                           float (&acc)[kCount]) const {
    const Operand<kRowBytes> slab(consumer.shared.base);
    const uint32_t x = stage * kStageBytes;
    if (are_sparse) {
      const Operand<kTwoFourColumns> weight(consumer.pieces);
      FenceRegisters(acc);
      FenceProducts();
      SparseProduct<T>(acc, weight.At(x), slab.At(x), metadata[0]);
      SparseProduct<T>(acc, weight.At(x + kSparsePieceBytes), slab.At(x + 2 * kTwoFourColumns),
                       metadata[1]);
      CommitProducts();
      FenceRegisters(acc);
      return;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t x_bytes = x + j * kTwoFourColumns * 2,
                     address = consumer.pieces + x + (place[j] & kPieceOffsetMask) * kPieceUnit;
      if (place[j] & kDensePiece) {
        const Operand<2 * kTwoFourColumns> weight(address);
        FenceRegisters(acc);
        FenceProducts();
        Product<T>(acc, weight.At(0), slab.At(x_bytes));
        Product<T>(acc, weight.At(kProductBytes), slab.At(x_bytes + kProductBytes));
        CommitProducts();
        FenceRegisters(acc);
      } else if (place[j] != 0) {
        const Operand<kTwoFourColumns> weight(address);
        FenceRegisters(acc);
        FenceProducts();
        SparseProduct<T>(acc, weight.At(0), slab.At(x_bytes), metadata[j]);
        CommitProducts();
        FenceRegisters(acc);
      }
    }
  }

  // Products read their metadata when they start, not when they are enqueued: this, after the wait for them, is what keeps
  // the registers from being used for something else before. (No metadata is all ones.)
  __device__ __forceinline__ void Keep() const {
    asm volatile(
        "{\n.reg .pred p;\n"
        "setp.eq.u32 p, %0, 0xffffffff;\n"
        "setp.eq.or.u32 p, %1, 0xffffffff, p;\n"
        "@p trap;\n}" ::"r"(metadata[0]),
        "r"(metadata[1]));
  }
};

// One tile's products and outputs.
template <typename T, int kTileTokens>
__device__ __forceinline__ void ConsumeTile(const CUtensorMap* y_map, const Params<T>& params,
                                            const Consumer& consumer, const Item& item,
                                            uint32_t& parity) {
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const bool stores = threadIdx.x % 128 == 0;
  const int64_t output = int64_t{item.group} * kTwoFourGroupRows +
                         (static_cast<int>(ClusterRank()) * 2 + warpgroup) * kTwoFourRows;
  const int64_t biased = output + warp * 16 + lane / 4;
  const float bias[2] = {BiasAt(params.to.bias, biased, params.to.out),
                         BiasAt(params.to.bias, biased + 8, params.to.out)};
  const auto buffer_of = [&](int t) {
    return consumer.shared.base + kStagingOffset +
           (warpgroup * kBuffers + t / kStagedTokens % kBuffers) * kBufferBytes;
  };
  const auto fetch_residuals = [&](int t) {
    FetchResiduals<T, kStagedTokens>(params.to, output, item.token + t, buffer_of(t));
  };
  if (params.to.residual !=
      nullptr) {  // as many as there are buffers for, while the tile is multiplied
    if (stores) WaitStoresRead<0>();
    SyncThreads(1 + warpgroup, 128);
#pragma unroll
    for (int t = 0; t < kBuffers * kStagedTokens; t += kStagedTokens) fetch_residuals(t);
  }
  float acc[kTileTokens / 2];
#pragma unroll
  for (int i = 0; i < kTileTokens / 2; ++i) acc[i] = 0.0f;
  // While a panel is multiplied, the next is looked at, in other registers.
  Pieces pieces[2];
  const int steps = Steps(item);
  if (steps > 0) {
    Wait(consumer.shared.Barriers().Full(0), parity);
    pieces[0].Load(consumer, 0);
  }
  for (int step = 0; step < steps; step += kStages) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      pieces[s % 2].Multiply<T>(consumer, s, acc);
      const int next = (s + 1) % kStages;
      if (next == 0) parity ^= 1;
      if (next > 0 || step + kStages < steps) {
        Wait(consumer.shared.Barriers().Full(next), parity);
        pieces[(s + 1) % 2].Load(consumer, next);
      }
      WaitProducts<0>();
      pieces[s % 2].Keep();
      Arrive(consumer.shared.Read(s));
      if (consumer.empty != 0) ArriveInCluster(consumer.empty + 8 * s);
    }
  }
  FenceRegisters(acc);

#pragma unroll
  for (int t = 0; t < kTileTokens; t += kStagedTokens) {
    if (params.to.residual != nullptr) WaitResiduals();
    if (stores) WaitStoresRead<kBuffers - 1>();  // this buffer's last store has left it
    SyncThreads(1 + warpgroup, 128);
    if (t >= kBuffers * kStagedTokens && params.to.residual != nullptr) {
      fetch_residuals(t);
      WaitResiduals();
      SyncThreads(1 + warpgroup, 128);
    }
    StageOutputs<T>(acc + t / 2, bias, params.to, output + warp * 16, buffer_of(t));
    FenceAsyncProxy();
    SyncThreads(1 + warpgroup, 128);
    if (stores) {
      StoreBox(y_map, buffer_of(t), static_cast<int>(output), item.token + t);
      CommitStores();
    }
  }
}

template <typename T>
__device__ __forceinline__ void Consume(const CUtensorMap* y_map, const Params<T>& params,
                                        const Shared& shared) {
  const Consumer consumer(shared);
  uint32_t parity = 0;
  int tile = ClusterTile(params, 0);
  Item item(params, tile);
  for (int round = 0; tile >= 0; ++round) {
    const int next_tile = ClusterTile(params, round + 1);
    const Item next_item(params, next_tile);  // asked for a tile before it is needed
    if (item.tokens == kTokens) {
      ConsumeTile<T, kTokens>(y_map, params, consumer, item, parity);
    } else {
      ConsumeTile<T, kTokens / 2>(y_map, params, consumer, item, parity);
    }
    tile = next_tile;
    item = next_item;
  }
  if (threadIdx.x % 128 == 0) WaitStoresRead<0>();
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    TwoFourKernel(const __grid_constant__ CUtensorMap x_map,
                  const __grid_constant__ CUtensorMap y_map, const Params<T> params) {
  extern __shared__ char dynamic_shared[];
  const Shared shared{Kept((SharedAddress(dynamic_shared) + kImageAlignment - 1) / kImageAlignment *
                           kImageAlignment)};
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) InitBarrier(shared.Read(s), 32 * kConsumerWarps);
    InitRing(shared.Barriers(), kStages, kCluster * kConsumerWarps, 2);
    PrefetchMap(&x_map);
    PrefetchMap(&y_map);
  }
  ReleaseSuccessors();
  __syncthreads();
  MeetCluster();
  if (threadIdx.x >= 32 * kConsumerWarps) {
    ShrinkRegisters<kProducerRegisters>();
    const int warp = threadIdx.x / 32 - kConsumerWarps;
    if (warp == 0) ProduceX<T>(&x_map, params, shared);
    if (warp == 1) ProduceWeights<T>(params, shared);
  } else {
    GrowRegisters<kConsumerRegisters>();
    WaitForPredecessors();
    Consume<T>(&y_map, params, shared);
  }
  SyncCluster();  // the other thread block may still arrive here or copy to here
}

template <typename T>
KernelStatus RunTyped(const KernelContext& ctx, const LinearArgs& args) {
  const TwoFourImage image = TwoFourImageOf(args.weight);
  CUtensorMap x_map, y_map;
  KernelStatus status = MakeTensorMap(&x_map, args.io_dtype, args.x, args.tokens, args.weight.in,
                                      args.x_stride, kBoxTokens, kTwoFourPanelColumns);
  if (!status.ok()) return status;
  status = MakeTensorMap(&y_map, args.io_dtype, args.y, args.tokens, args.weight.out, args.y_stride,
                         kStagedTokens, kTwoFourRows);
  if (!status.ok()) return status;
  const int64_t token_tiles = (args.tokens + kTokens - 1) / kTokens;
  const int64_t tiles = token_tiles * image.groups, most = MultiprocessorCount() / kCluster;
  if (tiles > INT32_MAX / 2) return {KernelCode::kUnsupported, "2:4: too many tiles for one grid"};
  // Tiles of a last round that fit it as halves: those take 0.6 times as long.
  const int64_t halved = tiles % most * 2 <= most ? tiles % most : 0, items = tiles + halved;
  const char* base = static_cast<const char*>(args.weight.packed);
  const Params<T> params{reinterpret_cast<const int32_t*>(base),
                         reinterpret_cast<const uint4*>(base + image.panels_offset),
                         base + image.pieces_offset,
                         static_cast<int32_t>(image.groups),
                         static_cast<int32_t>(token_tiles),
                         static_cast<int32_t>(tiles - halved),
                         static_cast<int32_t>(items),
                         OutputOf<T>(args)};
  const int64_t clusters = items < most ? items : most;
  return Launch(
      ctx,
      {dim3(static_cast<unsigned>(kCluster * clusters)), kThreads, kSharedBytes, kCluster, true},
      TwoFourKernel<T>, x_map, y_map, params);
}

}  // namespace

KernelStatus RunTwoFour(const KernelContext& ctx, const LinearArgs& args) {
  static_assert(sizeof(TwoFourPanel) == sizeof(uint4));
  if (!FitsTwoFourImage(DescOfArgs(args))) {
    return {KernelCode::kUnsupported, "2:4: needs 2-byte csr or diagonal(1)"};
  }
  if (KernelStatus status = CheckArgs(args); !status.ok() || args.tokens == 0) return status;
  return args.io_dtype == DType::kBFloat16 ? RunTyped<BFloat16>(ctx, args)
                                           : RunTyped<Float16>(ctx, args);
}

}  // namespace espalier::kernels::cuda
