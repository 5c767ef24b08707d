// linear_pair.cu — two layers of 64-row blocks on Hopper with the values between them in shared memory (linear_pair.h).
//
// A persistent thread block takes a tile of tokens through both layers (linear_pair_shape.h). Warp 12 loads x of the tile,
// one box a 64-column panel; warps 13 to 15 weight panels of both layers, each into the ring of one warpgroup. Chunk after
// chunk of hidden panels, each of the three warpgroups that multiply
//
//   makes one hidden panel: product, bias, activation, into shared memory,
//   adds what the chunk kPairLag before contributes to its third of the block rows of y, which stay in accumulators.
//
// A warpgroup may be a chunk or two ahead of another, so that activations (ALU) of one overlap products (tensor cores) of
// another. As in block_linear_slab.cu the product comes out transposed, weights being the 64-row operand, and stmatrix
// turns it; a staged panel of tokens × 64 hidden values is at once the operand of the second product.
//
// What bounds it, 768 → 3072 → 768 at 90 %: shared memory, 28 clocks an instruction of 48 tokens where the tensor cores
// need 24, plus the panels' way in: 23,000 clocks a tile; activations take 16,000 issue slots a scheduler beside them.
// One warpgroup for the first layer and two for the second took 73,000 clocks: four warps cannot activate fast enough.
#include <iterator>

#include "kernels/cuda/block_image.h"
#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/pipeline.cuh"
#include "kernels/cuda/device/staging.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/linear_pair_shape.h"
#include "kernels/cuda/ops.h"
#include "kernels/linear_pair/linear_pair.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kRowBytes = 128;               // 64 values
constexpr int kWarps = 4 * kPairWarpgroups;  // that multiply
constexpr int kThreads = 32 * (kWarps + 4);
// 128 · (3 · 160 + 32) = 512 · 128, what a thread block of 512 threads is launched with.
constexpr int kConsumerRegisters = 160, kProducerRegisters = 32;

template <typename T>
struct Params {
  const RowSpan* rows1;
  const RowSpan* rows2;  // most panels first
  const Panel* panels1;
  const Panel* panels2;
  const char* values1;
  const char* values2;
  PairShape shape;
  int32_t first_rows;  // block rows of the first weight: hidden panels beyond them are zero
  int32_t chunks;
  int32_t stages;
  int32_t tiles;
  LinearOutput<T> hidden;  // without y and residual
  LinearOutput<T> to;
};

// Shared-memory addresses.
template <int kTokens>
struct Shared {
  static constexpr int kPanelBytes = kTokens * kRowBytes;

  template <typename T>
  __device__ __forceinline__ Shared(uint32_t base, const Params<T>& params) {
    x = (base + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
    hidden = x + params.shape.in_panels * kPanelBytes;
    staging = hidden + kPairChunks * kPairWarpgroups * kPanelBytes;
    rings = staging + kPairWarpgroups * kPanelBytes;
    barriers = rings + kPairWarpgroups * params.stages * kPairPanelBytes;
    masks2 = Extra(2 + 2 * kPairChunks);
    offsets1 = masks2 + 4 * kPairWarpgroups * params.chunks;
    ends1 = offsets1 + 2 * static_cast<uint32_t>(params.shape.panels1);
  }
  __device__ __forceinline__ RingBarriers Ring(int of) const {
    return {barriers + 16 * of * kPairMostStages,
            barriers + 16 * of * kPairMostStages + 8 * kPairMostStages};
  }
  __device__ __forceinline__ uint32_t Extra(int i) const {
    return barriers + 16 * kPairWarpgroups * kPairMostStages + 8 * i;
  }
  __device__ __forceinline__ uint32_t XFull() const { return Extra(0); }
  __device__ __forceinline__ uint32_t XEmpty() const { return Extra(1); }
  __device__ __forceinline__ uint32_t HiddenFull(int chunk) const { return Extra(2 + chunk); }
  __device__ __forceinline__ uint32_t HiddenEmpty(int chunk) const {
    return Extra(2 + kPairChunks + chunk);
  }
  __device__ __forceinline__ uint32_t Hidden(int chunk, int panel) const {
    return hidden + (chunk * kPairWarpgroups + panel) * kPanelBytes;
  }
  // Bit kPairWarpgroups · k + i: row k of the warpgroup has a panel for hidden panel i of the chunk.
  __device__ __forceinline__ uint32_t Mask(int warpgroup, int chunk) const {
    return masks2 + 4 * (kPairWarpgroups * chunk + warpgroup);
  }
  // The first weight's panels for hidden panel i are [end i, end i + 1).
  __device__ __forceinline__ int End(int i) const {
    return static_cast<int>(LoadShared16(ends1 + 2 * i));
  }

  uint32_t x, hidden, staging, rings, barriers;
  uint32_t masks2;
  uint32_t
      offsets1;  // two bytes a panel of the first weight: where its x begins, in units of 16 bytes from x
  uint32_t ends1;  // two bytes
};

// Which of rows2 is row k of a warpgroup: 0 5 6 11 …, 1 4 7 10 …, 2 3 8 9 …, so that all get about as many panels.
__device__ __forceinline__ int OrderOf(int warpgroup, int k) {
  return kPairWarpgroups * k + (k % 2 == 0 ? warpgroup : kPairWarpgroups - 1 - warpgroup);
}

// The tables, by all threads; `masks2` has been zeroed.
template <typename T, int kTokens>
__device__ __forceinline__ void FillTables(const Params<T>& params, const Shared<kTokens>& shared) {
  for (int64_t i = threadIdx.x; i < params.shape.panels1; i += kThreads) {
    const uint32_t offset = params.panels1[i].column / 64 * shared.kPanelBytes / 16;
    StoreShared16(shared.offsets1 + 2 * static_cast<uint32_t>(i), offset);
  }
  for (int i = threadIdx.x; i <= params.shape.hidden_panels; i += kThreads) {
    const bool is_row = i < params.first_rows;
    const int at = is_row ? params.rows1[i].row + 1 : i == params.shape.hidden_panels ? 0 : i + 1;
    const int end = is_row                            ? params.rows1[i].end
                    : i == params.shape.hidden_panels ? 0
                                                      : static_cast<int>(params.shape.panels1);
    StoreShared16(shared.ends1 + 2 * at, end);
  }
  for (int slot = threadIdx.x; slot < params.shape.out_rows + kPairWarpgroups; slot += kThreads) {
    const int warpgroup = slot % kPairWarpgroups, k = slot / kPairWarpgroups;
    const int i = OrderOf(warpgroup, k);
    if (i >= params.shape.out_rows) continue;
    const RowSpan span = params.rows2[i];
    for (int p = span.begin; p < span.end; ++p) {
      const int column = params.panels2[p].column / 64;
      OrShared(shared.Mask(warpgroup, column / kPairWarpgroups),
               1u << (kPairWarpgroups * k + column % kPairWarpgroups));
    }
  }
}

template <typename T, int kTokens>
__device__ __forceinline__ void LoadX(const CUtensorMap* x_map, const Params<T>& params,
                                      const Shared<kTokens>& shared) {
  uint32_t parity = 0;
  for (int tile = blockIdx.x; tile < params.tiles; tile += gridDim.x, parity ^= 1) {
    Wait(shared.XEmpty(), parity ^ 1);
    ArriveExpecting(shared.XFull(), params.shape.in_panels * shared.kPanelBytes);
    for (int i = 0; i < params.shape.in_panels; ++i)
      CopyBox(shared.x + i * shared.kPanelBytes, x_map, 64 * i, tile * kTokens, shared.XFull());
  }
}

// Panels in the order in which Multiply takes them.
template <typename T, int kTokens, int kRows>
__device__ __forceinline__ void LoadPanels(const Params<T>& params, const Shared<kTokens>& shared,
                                           int warpgroup) {
  const RingBarriers barriers = shared.Ring(warpgroup);
  const uint32_t ring = shared.rings + warpgroup * params.stages * kPairPanelBytes;
  RingPosition<kPairMostStages> at;
  const auto load = [&](const char* values, int panel) {
    Wait(barriers.Empty(at.stage), at.parity ^ 1);
    ArriveExpecting(barriers.Full(at.stage), kPairPanelBytes);
    CopyBulk(ring + at.stage * kPairPanelBytes, values + int64_t{panel} * kPairPanelBytes,
             kPairPanelBytes, barriers.Full(at.stage));
    at.Advance(params.stages);
  };
  for (int tile = blockIdx.x; tile < params.tiles; tile += gridDim.x) {
    int next[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int i = OrderOf(warpgroup, k);
      next[k] = i < params.shape.out_rows ? params.rows2[i].begin : 0;
    }
    for (int chunk = 0; chunk < params.chunks + kPairLag; ++chunk) {
      const int mine = chunk * kPairWarpgroups + warpgroup;
      if (mine < params.shape.hidden_panels) {
        for (int p = shared.End(mine), end = shared.End(mine + 1); p < end; ++p)
          load(params.values1, p);
      }
      if (chunk < kPairLag) continue;
      const uint32_t mask = LoadShared32(shared.Mask(warpgroup, chunk - kPairLag));
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        for (int i = 0; i < kPairWarpgroups; ++i) {
          if ((mask >> (kPairWarpgroups * k + i) & 1) != 0) load(params.values2, next[k]++);
        }
      }
    }
  }
}

// An assignment that stays where it stands: one that the compiler moves in between products serialises them.
__device__ __forceinline__ void Move(float& to, float value) {
  asm volatile("mov.f32 %0, %1;" : "=f"(to) : "f"(value));
}

// The multiplying side of a ring: one product may be under way, whose stage is released after the next one has begun.
template <int kTokens>
struct Multiplier {
  const RingBarriers barriers;
  const Operand<kRowBytes> ring;
  const int stages;
  RingPosition<kPairMostStages> at{};
  int pending = -1;

  __device__ __forceinline__ void Release() {
    if (threadIdx.x % 32 == 0) Arrive(barriers.Empty(pending));
  }
  // acc += the ring's next panel · bᵀ.
  template <typename T>
  __device__ __forceinline__ void Add(float (&acc)[kTokens / 2], Operand<kRowBytes> b) {
    Wait(barriers.Full(at.stage), at.parity);
    const Operand<kRowBytes> weight = ring.Plus(at.stage * kPairPanelBytes);
    FenceRegisters(acc);
    FenceProducts();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      Product<T>(acc, weight.At(k * kProductBytes), b.At(k * kProductBytes));
    CommitProducts();
    FenceRegisters(acc);
    if (pending >= 0) {
      WaitProducts<1>();
      Release();
    }
    pending = at.stage;
    at.Advance(stages);
  }
  __device__ __forceinline__ void Finish() {
    WaitProducts<0>();
    if (pending >= 0) Release();
    pending = -1;
  }
};

template <typename T, int kTokens, int kRows>
__device__ __forceinline__ void Multiply(const CUtensorMap* y_map, const Params<T>& params,
                                         const Shared<kTokens>& shared, int warpgroup) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const bool stores = threadIdx.x % 128 == 0;
  const int row = warp * 16 + lane / 4;  // and 8 further: of the 64 that a panel has, this thread's
  const uint32_t staging = shared.staging + warpgroup * shared.kPanelBytes;
  const uint32_t hidden_staging = shared.Hidden(0, warpgroup) + StagingOffset();
  const Operand<kRowBytes> x(shared.x), hidden_panels(shared.hidden);
  const auto hidden_out = static_cast<int>(params.hidden.out);
  Multiplier<kTokens> ring{
      shared.Ring(warpgroup),
      Operand<kRowBytes>(shared.rings + warpgroup * params.stages * kPairPanelBytes),
      params.stages};
  RingPosition<kPairChunks> made, taken;
  uint32_t x_parity = 0;
  for (int tile = blockIdx.x; tile < params.tiles; tile += gridDim.x, x_parity ^= 1) {
    float acc[kRows][kTokens / 2];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
#pragma unroll
      for (float& value : acc[k]) value = 0.0f;
    }
    Wait(shared.XFull(), x_parity);
    for (int chunk = 0; chunk < params.chunks + kPairLag; ++chunk) {
      const int mine = chunk * kPairWarpgroups + warpgroup;
      const bool makes = mine < params.shape.hidden_panels;
      float bias[2] = {};
      int next = 0, end = 0;
      if (makes) {
        next = shared.End(mine), end = shared.End(mine + 1);
        if (params.hidden.bias != nullptr) {  // beyond the last output is zeroed below
#pragma unroll
          for (int i = 0; i < 2; ++i)
            bias[i] = __ldg(params.hidden.bias + min(64 * mine + row + 8 * i, hidden_out - 1));
        }
      }
      float hidden[kTokens / 2];
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) Move(hidden[i], bias[i / 2 % 2]);
      for (; next < end; ++next)
        ring.template Add<T>(hidden, x.Plus(16 * LoadShared16(shared.offsets1 + 2 * next)));
      if (chunk >= kPairLag) {
        const uint32_t mask = LoadShared32(shared.Mask(warpgroup, chunk - kPairLag));
        const Operand<kRowBytes> panels =
            hidden_panels.Plus(taken.stage * kPairWarpgroups * shared.kPanelBytes);
        Wait(shared.HiddenFull(taken.stage), taken.parity);
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
          for (uint32_t left = mask >> kPairWarpgroups * k & 7; left != 0; left &= left - 1)
            ring.template Add<T>(acc[k], panels.Plus((__ffs(left) - 1) * shared.kPanelBytes));
        }
      }
      ring.Finish();
      FenceRegisters(hidden);
      if (chunk >= kPairLag) {
        if (lane == 0) Arrive(shared.HiddenEmpty(taken.stage));
        taken.Advance();
      }
      if (chunk >= params.chunks) continue;
      if (chunk == params.chunks - 1 && lane == 0) Arrive(shared.XEmpty());
      Wait(shared.HiddenEmpty(made.stage), made.parity ^ 1);
      if (makes) {
        Activate<T>(hidden, params.hidden.activation);
        if (64 * mine + 64 > hidden_out) {
#pragma unroll
          for (int i = 0; i < kTokens / 2; ++i)
            hidden[i] = 64 * mine + row + i / 2 % 2 * 8 < hidden_out ? hidden[i] : 0.0f;
        }
        StoreStaged<T, kTokens>(hidden,
                                hidden_staging + made.stage * kPairWarpgroups * shared.kPanelBytes);
        FenceAsyncProxy();
      }
      Arrive(shared.HiddenFull(made.stage));
      made.Advance();
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      FenceRegisters(acc[k]);
      const int i = OrderOf(warpgroup, k);
      if (i >= params.shape.out_rows) continue;
      const int64_t output = int64_t{64} * params.rows2[i].row;
      const float bias[2] = {BiasAt(params.to.bias, output + row, params.to.out),
                             BiasAt(params.to.bias, output + row + 8, params.to.out)};
      if (stores) WaitStoresRead<0>();  // the last store has left the buffer
      SyncThreads(1 + warpgroup, 128);
      if (params.to.residual != nullptr) {
        FetchResiduals<T, kTokens>(params.to, output, int64_t{tile} * kTokens, staging);
        WaitResiduals();
        SyncThreads(1 + warpgroup, 128);
      }
      StageOutputs<T, kTokens>(acc[k], bias, params.to, output + warp * 16, staging);
      FenceAsyncProxy();
      SyncThreads(1 + warpgroup, 128);
      if (stores) {
        StoreBox(y_map, staging, static_cast<int>(output), tile * kTokens);
        CommitStores();
      }
    }
  }
  if (stores) WaitStoresRead<0>();
}

template <typename T, int kTokens, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    LinearPairKernel(const __grid_constant__ CUtensorMap x_map,
                     const __grid_constant__ CUtensorMap y_map, const Params<T> params) {
  extern __shared__ char memory[];
  const Shared<kTokens> shared(SharedAddress(memory), params);
  if (threadIdx.x == 0) {
    for (int r = 0; r < kPairWarpgroups; ++r) InitRing(shared.Ring(r), params.stages, 4);
    InitBarrier(shared.XFull(), 1);
    InitBarrier(shared.XEmpty(), kWarps);
    for (int chunk = 0; chunk < kPairChunks; ++chunk) {
      InitBarrier(shared.HiddenFull(chunk), 32 * kWarps);
      InitBarrier(shared.HiddenEmpty(chunk), kWarps);
    }
    FenceBarrierInit();
    PrefetchMap(&x_map);
    PrefetchMap(&y_map);
  }
  ReleaseSuccessors();
  for (int i = threadIdx.x; i < kPairWarpgroups * params.chunks; i += kThreads)
    StoreShared32(shared.masks2 + 4 * i, 0);
  __syncthreads();
  FillTables(params, shared);
  __syncthreads();
  WaitForPredecessors();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == kPairWarpgroups) {
    ShrinkRegisters<kProducerRegisters>();
    const int job = threadIdx.x / 32 % 4;
    if (threadIdx.x % 32 != 0) return;
    if (job == 0)
      LoadX(&x_map, params, shared);
    else
      LoadPanels<T, kTokens, kRows>(params, shared, job - 1);
  } else {
    GrowRegisters<kConsumerRegisters>();
    Multiply<T, kTokens, kRows>(&y_map, params, shared, warpgroup);
  }
}

template <typename T, int kTile>
KernelStatus RunTile(const KernelContext& ctx, const LinearPairArgs& args, const PairShape& shape) {
  constexpr PairTile kShape = kPairTiles[kTile];
  const LinearArgs &first = args.first, &second = args.second;
  CUtensorMap x_map, y_map;
  KernelStatus status = MakeTensorMap(&x_map, first.io_dtype, first.x, first.tokens,
                                      first.weight.in, first.x_stride, kShape.tokens, 64);
  if (!status.ok()) return status;
  status = MakeTensorMap(&y_map, second.io_dtype, second.y, second.tokens, second.weight.out,
                         second.y_stride, kShape.tokens, 64);
  if (!status.ok()) return status;
  const BlockImage image1 = BlockImageOf(first.weight), image2 = BlockImageOf(second.weight);
  const char* base1 = static_cast<const char*>(first.weight.packed);
  const char* base2 = static_cast<const char*>(second.weight.packed);
  const int64_t tiles = (first.tokens + kShape.tokens - 1) / kShape.tokens;
  Params<T> params{};
  params.rows1 = reinterpret_cast<const RowSpan*>(base1 + image1.rows_offset);
  params.rows2 = reinterpret_cast<const RowSpan*>(base2 + image2.rows_offset);
  params.panels1 = reinterpret_cast<const Panel*>(base1 + image1.panels_offset);
  params.panels2 = reinterpret_cast<const Panel*>(base2 + image2.panels_offset);
  params.values1 = base1 + image1.values_offset;
  params.values2 = base2 + image2.values_offset;
  params.shape = shape;
  params.first_rows = static_cast<int32_t>(image1.block_rows_count);
  params.chunks = PairChunks(shape);
  params.stages = PairStages(kShape, shape);
  params.tiles = static_cast<int32_t>(tiles);
  params.hidden = OutputOf<T>(first);
  params.to = OutputOf<T>(second);
  const int64_t blocks = tiles < MultiprocessorCount() ? tiles : MultiprocessorCount();
  return Launch(ctx, {dim3(static_cast<unsigned>(blocks)), kThreads, kPairSharedBytes, 1, true},
                LinearPairKernel<T, kShape.tokens, kShape.out_rows>, x_map, y_map, params);
}

template <typename T>
KernelStatus RunType(const KernelContext& ctx, const LinearPairArgs& args) {
  const PairShape shape = PairShapeOf(args.first.weight, args.second.weight);
  // Clocks of a tile are about 13,000 for what every tile costs (its weights' way in) and 200 a token.
  int best = -1;
  int64_t best_cost = 0;
  for (int i = 0; i < static_cast<int>(std::size(kPairTiles)); ++i) {
    if (PairStages(kPairTiles[i], shape) == 0) continue;
    const int64_t tiles = (args.first.tokens + kPairTiles[i].tokens - 1) / kPairTiles[i].tokens;
    const int64_t waves = (tiles + MultiprocessorCount() - 1) / MultiprocessorCount();
    const int64_t cost = waves * (13000 + 200 * kPairTiles[i].tokens);
    if (best < 0 || cost < best_cost) best = i, best_cost = cost;
  }
  return best == 0   ? RunTile<T, 0>(ctx, args, shape)
         : best == 1 ? RunTile<T, 1>(ctx, args, shape)
                     : RunTile<T, 2>(ctx, args, shape);
}

}  // namespace

KernelStatus LinearPairOnDevice(const KernelContext& ctx, const LinearPairArgs& args) {
  if (!FitsLinearPair(DescOfArgs(args.first), DescOfArgs(args.second), Arch::kSm90))
    return {KernelCode::kUnsupported,
            "linear pair: needs two-byte blocks of 64 rows and 64 or 128 columns"};
  if (args.first.residual != nullptr)
    return {KernelCode::kInvalidArgument, "linear pair: the first layer takes no residual"};
  LinearArgs first = args.first, second = args.second;
  // Each lacks one pointer, in place of which the other's passes the checks.
  first.y = second.y, first.y_stride = first.weight.out + 64 - first.weight.out % 64;
  second.x = first.x, second.x_stride = first.y_stride;
  for (const LinearArgs* checked : {&first, &second}) {
    if (KernelStatus status = CheckArgs(*checked); !status.ok()) return status;
  }
  if (first.tokens == 0) return {};
  return first.io_dtype == DType::kBFloat16 ? RunType<BFloat16>(ctx, args)
                                            : RunType<Float16>(ctx, args);
}

}  // namespace espalier::kernels::cuda
