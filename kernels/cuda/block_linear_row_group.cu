// block_linear_row_group.cu — blocks of 16 or 32 rows on Hopper: several block rows share each slab of x.
//
// Persistent thread blocks of one producer warp and two consumer warpgroups. A tile is one group of 256 outputs (16 or 8
// block rows, row_group_image.h) times 128 tokens, 64 a warpgroup; x is wgmma's 64-row operand, a panel its 16- or
// 32-column one, and every block row has accumulators of its own, so that the loop over rows is unrolled and the loop over
// a row's panels is not. Tensor cores run at half speed or less this way (their operand reads fill shared memory's
// bandwidth), but L2 traffic, the roof of narrow blocks, is halved.
#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/pipeline.cuh"
#include "kernels/cuda/device/tile_walk.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/row_group_image.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kTileTokens = 128;
constexpr int kConsumerWarps = 8;
constexpr int kThreads = 32 * (kConsumerWarps + 4);
constexpr int kProducerRegisters = 40;  // 128 · 40 + 256 · 232 = 384 · 168
constexpr int kConsumerRegisters = 232;
constexpr int kStages = 4;

template <int kRows, int kColumns>
struct Tile {
  static constexpr int kGroup = GroupRows(kRows);
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kSlabBytes = kTileTokens * kRowBytes;
  static constexpr int kXBytes = StepSlabs(kColumns) * kSlabBytes;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kWeightBytes = StepPanels(kRows, kColumns) * kPanelBytes;
  static constexpr int kStageBytes = kXBytes + kWeightBytes;
  static constexpr int kSharedBytes = kStages * (kStageBytes + sizeof(Step)) + 2 * kImageAlignment;
  static_assert(kSharedBytes <= 227 * 1024);
};

template <typename T>
struct Params {
  const GroupSpan* groups;
  const Step* steps;
  const char* values;
  int32_t group_count;
  int32_t tiles;
  LinearOutput<T> to;
};

// Shared-memory addresses of the ring.
struct Shared {
  uint32_t stages;
  uint32_t steps;
  RingBarriers barriers;
};

template <typename T, int kRows, int kColumns>
__device__ __forceinline__ void Produce(const CUtensorMap* x_map, const Params<T>& params, const Shared& shared) {
  using Tile = Tile<kRows, kColumns>;
  const int lane = threadIdx.x % 32;
  RingPosition<kStages> ring;
  for (int round = 0;; ++round) {
    const int tile = TileOf(round, params.tiles);
    if (tile < 0) break;
    const GroupSpan span = params.groups[tile % params.group_count];
    const int token = tile / params.group_count * kTileTokens;
    // Lane i holds word i of the step's head: slabs, panels, first_panel (2 words), columns. One step ahead.
    constexpr int kHeadWords = 4 + kMaxStepSlabs;
    const auto head_of = [&](int s) {
      return s < span.end && lane < kHeadWords ? reinterpret_cast<const int32_t*>(params.steps + s)[lane] : 0;
    };
    int32_t head = head_of(span.begin);
    for (int s = span.begin; s < span.end; ++s) {
      const int32_t next_head = head_of(s + 1);
      const int slabs = __shfl_sync(0xffffffffu, head, 0), panels = __shfl_sync(0xffffffffu, head, 1);
      const int64_t first_panel = __shfl_sync(0xffffffffu, head, 2);  // below 2^31: FitsBlockImage
      const int column = __shfl_sync(0xffffffffu, head, 4 + lane % kMaxStepSlabs);
      const uint32_t full = shared.barriers.Full(ring.stage);
      const uint32_t stage = shared.stages + ring.stage * Tile::kStageBytes;
      Wait(shared.barriers.Empty(ring.stage), ring.parity ^ 1);
      if (lane == 0) {
        ArriveExpecting(full, slabs * Tile::kSlabBytes + panels * Tile::kPanelBytes + sizeof(Step));
        CopyBulk(shared.steps + ring.stage * sizeof(Step), params.steps + s, sizeof(Step), full);
        CopyBulk(stage + Tile::kXBytes, params.values + first_panel * Tile::kPanelBytes, panels * Tile::kPanelBytes,
                 full);
      }
      __syncwarp();  // bytes are expected before the first of them can arrive
      if (lane < slabs) CopyBox(stage + lane * Tile::kSlabBytes, x_map, column, token, full);
      __syncwarp();
      ring.Advance();
      head = next_head;
    }
  }
}

// acc[g] += the panels of row g in this stage.
template <typename T, int kRows, int kColumns>
__device__ __forceinline__ void MultiplyStage(float (&acc)[GroupRows(kRows)][kRows / 2], uint32_t stage, uint32_t step,
                                              int warpgroup) {
  using Tile = Tile<kRows, kColumns>;
  const Operand<Tile::kRowBytes> x(stage + warpgroup * 64 * Tile::kRowBytes), weight(stage + Tile::kXBytes);
  static_assert(StepPanels(kRows, kColumns) < kMaxStepPanels, "one slab number is read ahead");
  const uint4 ends = LoadShared128(step + offsetof(Step, row_end));
  const uint32_t end_words[4] = {ends.x, ends.y, ends.z, ends.w};
  uint32_t slab_address = step + offsetof(Step, slab);
  uint32_t slab = LoadShared8(slab_address);
  int i = 0;
#pragma unroll
  for (int g = 0; g < Tile::kGroup; ++g) {
    const int end = end_words[g / 4] >> (8 * (g % 4)) & 255;
#pragma unroll 1
    for (; i < end; ++i) {
      const uint32_t x_bytes = slab * Tile::kSlabBytes;
      slab = LoadShared8(++slab_address);  // of the next panel, whichever row it is in
#pragma unroll
      for (int k = 0; k < kColumns / 16; ++k) {
        Product<T>(acc[g], x.At(x_bytes + k * kProductBytes), weight.At(i * Tile::kPanelBytes + k * kProductBytes));
      }
    }
  }
}

template <typename T, int kRows, int kColumns>
__device__ __forceinline__ void Consume(const Params<T>& params, const Shared& shared) {
  using Tile = Tile<kRows, kColumns>;
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  RingPosition<kStages> ring;
  float acc[Tile::kGroup][kRows / 2];
  for (int round = 0;; ++round) {
    const int tile = TileOf(round, params.tiles);
    if (tile < 0) break;
    const GroupSpan span = params.groups[tile % params.group_count];
#pragma unroll
    for (int g = 0; g < Tile::kGroup; ++g) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) acc[g][i] = 0.0f;
    }
    int previous = -1;
    for (int s = span.begin; s < span.end; ++s) {
      Wait(shared.barriers.Full(ring.stage), ring.parity);
#pragma unroll
      for (int g = 0; g < Tile::kGroup; ++g) FenceRegisters(acc[g]);
      FenceProducts();
      MultiplyStage<T, kRows, kColumns>(acc, shared.stages + ring.stage * Tile::kStageBytes,
                                        shared.steps + ring.stage * static_cast<uint32_t>(sizeof(Step)), warpgroup);
      CommitProducts();
#pragma unroll
      for (int g = 0; g < Tile::kGroup; ++g) FenceRegisters(acc[g]);
      if (previous >= 0) {
        WaitProducts<1>();
        if (lane == 0) Arrive(shared.barriers.Empty(previous));
      }
      previous = ring.stage;
      ring.Advance();
    }
    WaitProducts<0>();
#pragma unroll
    for (int g = 0; g < Tile::kGroup; ++g) FenceRegisters(acc[g]);
    if (previous >= 0 && lane == 0) Arrive(shared.barriers.Empty(previous));
    const int token = tile / params.group_count * kTileTokens + warpgroup * 64 + warp * 16;
#pragma unroll
    for (int g = 0; g < Tile::kGroup; ++g) {
      StoreTokenRows(acc[g], params.to, token, int64_t{span.group} * kGroupOutputs + g * kRows);
    }
  }
}

template <typename T, int kRows, int kColumns>
__global__ void __launch_bounds__(kThreads, 1)
    BlockRowGroupKernel(const __grid_constant__ CUtensorMap x_map, const Params<T> params) {
  using Tile = Tile<kRows, kColumns>;
  extern __shared__ char dynamic_shared[];
  Shared shared;
  shared.stages = (SharedAddress(dynamic_shared) + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
  shared.steps = shared.stages + kStages * Tile::kStageBytes;
  shared.barriers.full = shared.steps + kStages * sizeof(Step);
  shared.barriers.empty = shared.barriers.full + 8 * kStages;
  if (threadIdx.x == 0) InitRing(shared.barriers, kStages, kConsumerWarps);
  __syncthreads();
  if (threadIdx.x >= 32 * kConsumerWarps) {
    ShrinkRegisters<kProducerRegisters>();
    if (threadIdx.x < 32 * (kConsumerWarps + 1)) Produce<T, kRows, kColumns>(&x_map, params, shared);
  } else {
    GrowRegisters<kConsumerRegisters>();
    Consume<T, kRows, kColumns>(params, shared);
  }
}

template <typename T, int kRows, int kColumns>
KernelStatus RunShape(const KernelContext& ctx, const LinearArgs& args) {
  const RowGroupImage image = RowGroupImageOf(args.weight);
  CUtensorMap x_map;
  if (KernelStatus status = MakeTensorMap(&x_map, args.io_dtype, args.x, args.tokens, args.weight.in, args.x_stride,
                                          kTileTokens, kColumns);
      !status.ok()) {
    return status;
  }
  const char* base = static_cast<const char*>(args.weight.packed);
  const int64_t tiles = (args.tokens + kTileTokens - 1) / kTileTokens * image.groups;
  if (tiles > INT32_MAX) return {KernelCode::kUnsupported, "block row group: too many tiles for one grid"};
  const Params<T> params{reinterpret_cast<const GroupSpan*>(base),
                         reinterpret_cast<const Step*>(base + image.steps_offset),
                         base + image.values_offset,
                         static_cast<int32_t>(image.groups),
                         static_cast<int32_t>(tiles),
                         OutputOf<T>(args)};
  const int64_t blocks = tiles < MultiprocessorCount() ? tiles : MultiprocessorCount();
  return Launch(BlockRowGroupKernel<T, kRows, kColumns>, dim3(static_cast<unsigned>(blocks)), kThreads,
                Tile<kRows, kColumns>::kSharedBytes, ctx.stream, false, x_map, params);
}

template <typename T>
KernelStatus RunTyped(const KernelContext& ctx, const LinearArgs& args) {
  const int columns = PanelColumns(args.weight.block_cols);
  if (args.weight.block_rows == 16) {
    if (columns == 16) return RunShape<T, 16, 16>(ctx, args);
    if (columns == 32) return RunShape<T, 16, 32>(ctx, args);
    return RunShape<T, 16, 64>(ctx, args);
  }
  if (columns == 16) return RunShape<T, 32, 16>(ctx, args);
  if (columns == 32) return RunShape<T, 32, 32>(ctx, args);
  return RunShape<T, 32, 64>(ctx, args);
}

}  // namespace

KernelStatus RunBlockRowGroup(const KernelContext& ctx, const LinearArgs& args) {
  if (!FitsRowGroupImage(DescOfArgs(args))) {
    return {KernelCode::kUnsupported, "block row group: needs 2-byte blocks of 16 or 32 rows"};
  }
  if (KernelStatus status = CheckArgs(args); !status.ok() || args.tokens == 0) return status;
  return args.io_dtype == DType::kBFloat16 ? RunTyped<BFloat16>(ctx, args) : RunTyped<Float16>(ctx, args);
}

}  // namespace espalier::kernels::cuda
