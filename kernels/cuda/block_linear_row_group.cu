// block_linear_row_group.cu — blocks of 16 or 32 rows on Hopper: many block rows share each slab of x.
//
// Persistent thread blocks of one producer warp and eight consumer warps, each with 256 outputs and 128 tokens to compute: a
// warp takes four block rows of them for 64 (br = 16) or 32 tokens (br = 32). Every block row has accumulators of its own,
// so that the loop over rows is unrolled and the loop over a row's panels is not. With br = 16 two thread blocks form a
// cluster, have the two halves of a group (row_group_image.h), and load every other slab of x for both.
//
// Products are mma.sync. wgmma, in loops that enter the tensor pipeline anew for every panel, takes 116 clocks an instruction
// whatever its width (H200, 10,240³, 90 %, b = 16: 1.7 ms, L2 36 % busy). Without clusters L2 was 88 % busy with b = 16
// and 80 % with b = 32; with them, b = 32 loads more slabs than it saves (1.1 ms).
#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/pipeline.cuh"
#include "kernels/cuda/device/tile_walk.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/row_group_image.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kConsumerWarps = 8;
constexpr int kThreads = 32 * (kConsumerWarps + 4);
constexpr int kProducerRegisters = 72;  // 128 · 72 + 256 · 216 = 384 · 168
constexpr int kConsumerRegisters = 216;
constexpr int kStages = 3;
constexpr uint16_t kBoth = 3;  // thread blocks 0 and 1 of a cluster
constexpr int kWarpRows = 4;   // block rows of a warp
// Outputs leave in pieces of 32 for a warp's tokens, one 64-byte row a token, through a buffer a warp.
constexpr int kPieceOutputs = 32;

template <int kRows, int kColumns>
struct Tile {
  static constexpr int kCluster = Halves(kRows);
  // A stage is empty when every lane says so, which race checkers follow and which costs nothing measurable; across a
  // cluster, when each warp has told both thread blocks.
  static constexpr int kArrivals = (kCluster == 1 ? 32 : kCluster) * kConsumerWarps;
  static constexpr int kWarpOutputs = kWarpRows * kRows;
  static constexpr int kWarpColumns = kHalfOutputs / kWarpOutputs;  // warps side by side
  static constexpr int kWarpTokens = kGroupTokens * kWarpColumns / kConsumerWarps;
  static constexpr int kPieceBytes = kWarpTokens * kPieceOutputs * 2;
  static constexpr int kSlabRowBytes = SlabColumns(kColumns) * 2;
  static constexpr int kPanelRowBytes = kColumns * 2;
  static constexpr int kSlabBytes = SlabBytes(kColumns);
  static constexpr int kXBytes = StepSlabs(kColumns) * kSlabBytes;
  static constexpr int kPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kStageBytes = kXBytes + StepPanels(kRows, kColumns) * kPanelBytes;
  static constexpr int kSharedBytes =
      kStages * (kStageBytes + sizeof(Step)) + kConsumerWarps * kPieceBytes + kImageAlignment + 256;
  static_assert(kSharedBytes <= 227 * 1024);
};

// Of a thread: [block row][16 tokens][16 outputs and fragment]; 128 values.
template <int kRows>
using Accumulators = float[kWarpRows][64 / kRows][kRows / 2];

template <typename T>
struct Params {
  const GroupSpan* groups;
  const Step* steps;
  const char* values;
  int32_t group_count;
  int32_t tiles;
  LinearOutput<T> to;
};

// Shared-memory addresses; the same in both thread blocks of a cluster, which multicasts rely on.
struct Shared {
  uint32_t stages, pieces, steps;
  RingBarriers barriers;
};

template <int kCluster>
__device__ __forceinline__ int ClusterTile(int round, int tiles) {
  return TileOf(round, tiles, blockIdx.x / kCluster, gridDim.x / kCluster);
}
template <int kCluster>
__device__ __forceinline__ int HalfOf() {
  return kCluster == 2 ? static_cast<int>(ClusterRank()) : 0;
}

// The heads of up to 32 steps, one a lane. L2 takes longer to answer than a step to load, so they are fetched a batch ahead.
struct StepHead {
  int32_t slabs, panels, first_panel;  // first_panel is below 2^31: FitsBlockImage
  int32_t columns[kMaxStepSlabs];
};

template <int kHalves>
__device__ __forceinline__ StepHead HeadOf(const Step* steps, const GroupSpan& span, int first,
                                           int half) {
  const int s = first + threadIdx.x % 32;
  StepHead head{};
  if (s < span.end) {
    const Step& step = steps[s * kHalves + half];
    const int4* words = reinterpret_cast<const int4*>(&step);
    const int4 counts = words[0], columns = words[1];
    const int2 more = *reinterpret_cast<const int2*>(words + 2);
    head = {
        counts.x, counts.y, counts.z, {columns.x, columns.y, columns.z, columns.w, more.x, more.y}};
  }
  return head;
}

template <typename T, int kRows, int kColumns>
__device__ __forceinline__ void Produce(const CUtensorMap* x_map, const Params<T>& params,
                                        const Shared& shared) {
  using Tile = Tile<kRows, kColumns>;
  static_assert(kMaxStepSlabs == 6 && offsetof(Step, column) == 16);
  constexpr int kCluster = Tile::kCluster;
  const int lane = threadIdx.x % 32;
  const int half = HalfOf<kCluster>();
  RingPosition<kStages> ring;
  const auto span_of = [&](int tile) {
    return tile < 0 ? GroupSpan{} : params.groups[tile % params.group_count];
  };
  int tile = ClusterTile<kCluster>(0, params.tiles);
  GroupSpan span = span_of(tile);
  StepHead next = HeadOf<kCluster>(params.steps, span, span.begin, half);
  WaitForPredecessors();  // which write no weights
  for (int round = 0; tile >= 0; ++round) {
    const int next_tile = ClusterTile<kCluster>(round + 1, params.tiles);
    const GroupSpan next_span = span_of(next_tile);
    const int token = tile / params.group_count * kGroupTokens;
    for (int batch = span.begin; batch < span.end; batch += 32) {
      const StepHead head = next;
      next = batch + 32 < span.end
                 ? HeadOf<kCluster>(params.steps, span, batch + 32, half)
                 : HeadOf<kCluster>(params.steps, next_span, next_span.begin, half);
      for (int i = 0; i < min(32, span.end - batch); ++i) {
        const int slabs = __shfl_sync(0xffffffffu, head.slabs, i),
                  panels = __shfl_sync(0xffffffffu, head.panels, i);
        const int64_t first_panel = __shfl_sync(0xffffffffu, head.first_panel, i);
        int columns[kMaxStepSlabs];
#pragma unroll
        for (int c = 0; c < kMaxStepSlabs; ++c)
          columns[c] = __shfl_sync(0xffffffffu, head.columns[c], i);
        if (lane == 0) {
          const uint32_t full = shared.barriers.Full(ring.stage);
          const uint32_t stage = shared.stages + ring.stage * Tile::kStageBytes;
          Wait(shared.barriers.Empty(ring.stage), ring.parity ^ 1);  // in every thread block
          ArriveExpecting(full,
                          slabs * Tile::kSlabBytes + panels * Tile::kPanelBytes + sizeof(Step));
          CopyBulk(shared.steps + ring.stage * sizeof(Step),
                   params.steps + (batch + i) * kCluster + half, sizeof(Step), full);
#pragma unroll
          for (int slab = 0; slab < StepSlabs(kColumns); ++slab) {
            const uint32_t to = stage + slab * Tile::kSlabBytes;
            if (slab >= slabs) break;
            if constexpr (kCluster == 1) {
              CopyBox(to, x_map, columns[slab], token, full);
            } else if (slab % 2 == half) {
              CopyBoxToCluster(to, x_map, columns[slab], token, full, kBoth);
            }
          }
          if (panels > 0) {
            CopyBulk(stage + Tile::kXBytes, params.values + first_panel * Tile::kPanelBytes,
                     panels * Tile::kPanelBytes, full);
          }
        }
        __syncwarp();
        ring.Advance();
      }
    }
    if (span.begin == span.end)
      next = HeadOf<kCluster>(params.steps, next_span, next_span.begin, half);
    tile = next_tile;
    span = next_span;
  }
}

// acc[g] += the panels of row g in this stage, for the rows and tokens of this warp.
template <typename T, int kRows, int kColumns>
__device__ __forceinline__ void MultiplyStage(Accumulators<kRows>& acc, uint32_t stage,
                                              uint32_t step) {
  using Tile = Tile<kRows, kColumns>;
  static_assert(StepPanels(kRows, kColumns) <= kMaxStepPanels, "one offset is read ahead");
  constexpr int kXMask = SwizzleMask(SlabColumns(kColumns)), kWeightMask = SwizzleMask(kColumns);
  constexpr int kPieces = Tile::kWarpTokens / 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int x_row =
      (warp / Tile::kWarpColumns * Tile::kWarpTokens + lane % 16) * Tile::kSlabRowBytes;
  const int weight_row = (lane % 8 + lane / 16 * 8) * Tile::kPanelRowBytes;
  const int x_key = (x_row >> 3) & kXMask,
            weight_key = (weight_row >> 3) & kWeightMask;  // also 16 rows below
  const int x_half = lane / 16 * 16, weight_half = lane / 8 % 2 * 16;

  const int first_row = warp % Tile::kWarpColumns * kWarpRows;
  const uint32_t row_ends = step + offsetof(Step, row_end) + first_row;
  const uint32_t ends = LoadShared32(row_ends);
  int i = first_row == 0 ? 0 : LoadShared8(row_ends - 1);
  uint32_t offset_address = step + offsetof(Step, x_offset) + 2 * i;
  uint32_t weights = stage + Tile::kXBytes + i * Tile::kPanelBytes + weight_row;
  int x_offset = LoadShared16(offset_address) * 16;
#pragma unroll
  for (int g = 0; g < kWarpRows; ++g) {
    const int end = ends >> (8 * g) & 255;
#pragma unroll 1
    for (; i < end; ++i) {
      const uint32_t x = stage + x_row + (x_offset & ~(Tile::kSlabRowBytes - 1));
      const int within = x_offset & (Tile::kSlabRowBytes - 1);
      x_offset =
          LoadShared16(offset_address += 2) * 16;  // of the next panel, whichever row it is in
#pragma unroll
      for (int k = 0; k < kColumns / 16; ++k) {
        uint32_t a[kPieces][4];
#pragma unroll
        for (int m = 0; m < kPieces; ++m) {
          LoadMatrices(a[m],
                       x + m * 16 * Tile::kSlabRowBytes + ((within + 32 * k + x_half) ^ x_key));
        }
#pragma unroll
        for (int u = 0; u < kRows / 16; ++u) {
          uint32_t b[4];
          LoadMatrices(
              b, weights + u * 16 * Tile::kPanelRowBytes + ((32 * k + weight_half) ^ weight_key));
#pragma unroll
          for (int m = 0; m < kPieces; ++m) {
            Mma<T>(&acc[g][m][8 * u], a[m], b[0], b[1]);
            Mma<T>(&acc[g][m][8 * u + 4], a[m], b[2], b[3]);
          }
        }
      }
      weights += Tile::kPanelBytes;
    }
  }
}

// The residuals of a piece to the warp's buffer, from where they take the way back that the outputs take; 0 beyond the last
// output or token.
template <typename T, int kTokens>
__device__ __forceinline__ void FetchPiece(const LinearOutput<T>& to, int64_t first_output,
                                           int64_t first_token, uint32_t buffer) {
  constexpr int kChunks = kPieceOutputs / 8;  // of 16 bytes, a token
  const int lane = threadIdx.x % 32, chunk = lane % kChunks;
  const int64_t output = first_output + 8 * chunk;
  const int64_t left = (to.out - output) * 2;
  const int present = static_cast<int>(left < 0 ? 0 : left > 16 ? 16 : left);
#pragma unroll
  for (int row = lane / kChunks; row < kTokens; row += 32 / kChunks) {
    const int64_t token = first_token + row;
    const int bytes = token < to.tokens ? present : 0;
    const T* from = bytes > 0 ? to.residual + token * to.residual_stride + output : to.residual;
    Copy16(buffer + Swizzled(row * 64 + chunk * 16, SwizzleMask(kPieceOutputs)), from, bytes);
  }
  CommitCopies();
  WaitCopies<0>();
  __syncwarp();
}

// Piece `piece` of the warp's outputs, for its tokens, to its buffer, swizzled like the tensor map.
template <typename T, int kRows>
__device__ __forceinline__ void StagePiece(const Accumulators<kRows>& acc,
                                           const LinearOutput<T>& to, int64_t first_output,
                                           int64_t first_token, int piece, uint32_t buffer) {
  constexpr int kTiles = kRows / 8;  // 8-output tiles of a block row
  const int lane = threadIdx.x % 32;
  float bias[4][2];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int64_t output = first_output + 8 * t + lane % 4 * 2;
    bias[t][0] = BiasAt(to.bias, output, to.out);
    bias[t][1] = BiasAt(to.bias, output + 1, to.out);
  }
  if (to.residual != nullptr) FetchPiece<T, 64 / kRows * 16>(to, first_output, first_token, buffer);
#pragma unroll
  for (int m = 0; m < 64 / kRows; ++m) {
    float values[16];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int g = piece * kPieceOutputs / kRows + t / kTiles, j = t % kTiles;
#pragma unroll
      for (int i = 0; i < 4; ++i) values[4 * t + i] = acc[g][m][4 * j + i] + bias[t][i % 2];
    }
    // Lane 8q + i addresses token i of matrix q: tokens 0..7 and 8..15 of one 8-output tile, then of the next.
    const int token = m * 16 + lane / 8 % 2 * 8 + lane % 8;
    const auto matrices_at = [&](int t) {
      return buffer + Swizzled(token * 64 + (t + lane / 16) * 16, SwizzleMask(kPieceOutputs));
    };
    if (to.residual != nullptr) {
#pragma unroll
      for (int t = 0; t < 4; t += 2) {
        uint32_t matrices[4];
        LoadMatrices(matrices, matrices_at(t));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = UnpackPair<T>(matrices[i]);
          values[4 * t + 2 * i] += pair.x;
          values[4 * t + 2 * i + 1] += pair.y;
        }
      }
      __syncwarp();  // all have read what they are about to overwrite
    }
    Activate<T>(values, to.activation);
    if (first_output + kPieceOutputs > to.out) {
#pragma unroll
      for (int v = 0; v < 16; ++v) {
        if (first_output + v / 4 * 8 + lane % 4 * 2 + v % 2 >= to.out)
          values[v] = 0.0f;  // the tail of a row is zero
      }
    }
#pragma unroll
    for (int t = 0; t < 4; t += 2) {
      const uint32_t matrices[4] = {PackPair<T>(values[4 * t], values[4 * t + 1]),
                                    PackPair<T>(values[4 * t + 2], values[4 * t + 3]),
                                    PackPair<T>(values[4 * t + 4], values[4 * t + 5]),
                                    PackPair<T>(values[4 * t + 6], values[4 * t + 7])};
      StoreMatrices(matrices_at(t), matrices);
    }
  }
}

// Of this warp alone: no barrier with the others.
template <typename T, int kRows>
__device__ __forceinline__ void StoreOutputs(const Accumulators<kRows>& acc,
                                             const CUtensorMap* y_map, const LinearOutput<T>& to,
                                             int64_t first_output, int token, uint32_t buffer) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int piece = 0; piece < kWarpRows * kRows / kPieceOutputs; ++piece) {
    const int64_t output = first_output + piece * kPieceOutputs;
    if (lane == 0) WaitStoresRead<0>();
    __syncwarp();
    StagePiece<T, kRows>(acc, to, output, token, piece, buffer);
    FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) {
      if (output < to.out) StoreBox(y_map, buffer, static_cast<int>(output), token);
      CommitStores();
    }
  }
}

template <typename T, int kRows, int kColumns>
__device__ __forceinline__ void Consume(const CUtensorMap* y_map, const Params<T>& params,
                                        const Shared& shared) {
  using Tile = Tile<kRows, kColumns>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kCluster = Tile::kCluster;
  RingPosition<kStages> ring;
  const auto span_of = [&](int tile) {
    return tile < 0 ? GroupSpan{} : params.groups[tile % params.group_count];
  };
  int tile = ClusterTile<kCluster>(0, params.tiles);
  GroupSpan span = span_of(tile);
  WaitForPredecessors();
  for (int round = 0; tile >= 0; ++round) {
    const int next_tile = ClusterTile<kCluster>(round + 1, params.tiles);
    const GroupSpan next_span = span_of(next_tile);
    Accumulators<kRows> acc = {};
    for (int s = span.begin; s < span.end; ++s) {
      Wait(shared.barriers.Full(ring.stage), ring.parity);
      MultiplyStage<T, kRows, kColumns>(
          acc, shared.stages + ring.stage * Tile::kStageBytes,
          shared.steps + ring.stage * static_cast<uint32_t>(sizeof(Step)));
      __syncwarp();
      if constexpr (kCluster == 1) {
        Arrive(shared.barriers.Empty(ring.stage));
      } else {
        if (lane < 2) ArriveAt(shared.barriers.Empty(ring.stage), lane);  // at both thread blocks
      }
      ring.Advance();
    }
    const int64_t half = int64_t{span.group} * kCluster + HalfOf<kCluster>();
    const int64_t output = half * kHalfOutputs + warp % Tile::kWarpColumns * Tile::kWarpOutputs;
    const int token =
        tile / params.group_count * kGroupTokens + warp / Tile::kWarpColumns * Tile::kWarpTokens;
    StoreOutputs<T, kRows>(acc, y_map, params.to, output, token,
                           shared.pieces + warp * Tile::kPieceBytes);
    tile = next_tile;
    span = next_span;
  }
  if (lane == 0) WaitStoresRead<0>();
  __syncwarp();
}

template <typename T, int kRows, int kColumns>
__global__ void __launch_bounds__(kThreads, 1)
    BlockRowGroupKernel(const __grid_constant__ CUtensorMap x_map,
                        const __grid_constant__ CUtensorMap y_map, const Params<T> params) {
  using Tile = Tile<kRows, kColumns>;
  extern __shared__ char dynamic_shared[];
  Shared shared;
  shared.stages =
      (SharedAddress(dynamic_shared) + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
  shared.pieces = shared.stages + kStages * Tile::kStageBytes;
  shared.steps = shared.pieces + kConsumerWarps * Tile::kPieceBytes;
  shared.barriers.full = shared.steps + kStages * sizeof(Step);
  shared.barriers.empty = shared.barriers.full + 8 * kStages;
  if (threadIdx.x == 0) {
    InitRing(shared.barriers, kStages, Tile::kArrivals);
    PrefetchMap(&x_map);
    PrefetchMap(&y_map);
  }
  ReleaseSuccessors();
  __syncthreads();
  if constexpr (Tile::kCluster > 1) MeetCluster();
  if (threadIdx.x >= 32 * kConsumerWarps) {
    ShrinkRegisters<kProducerRegisters>();
    if (threadIdx.x < 32 * (kConsumerWarps + 1))
      Produce<T, kRows, kColumns>(&x_map, params, shared);
  } else {
    GrowRegisters<kConsumerRegisters>();
    Consume<T, kRows, kColumns>(&y_map, params, shared);
  }
  if constexpr (Tile::kCluster > 1)
    SyncCluster();  // the other thread block may still arrive here or copy to here
}

template <typename T, int kRows, int kColumns>
KernelStatus RunShape(const KernelContext& ctx, const LinearArgs& args) {
  const RowGroupImage image = RowGroupImageOf(args.weight);
  CUtensorMap x_map, y_map;
  KernelStatus status = MakeTensorMap(&x_map, args.io_dtype, args.x, args.tokens, args.weight.in,
                                      args.x_stride, kGroupTokens, SlabColumns(kColumns));
  if (!status.ok()) return status;
  status = MakeTensorMap(&y_map, args.io_dtype, args.y, args.tokens, args.weight.out, args.y_stride,
                         Tile<kRows, kColumns>::kWarpTokens, kPieceOutputs);
  if (!status.ok()) return status;
  const char* base = static_cast<const char*>(args.weight.packed);
  constexpr int kCluster = Tile<kRows, kColumns>::kCluster;
  const int64_t tiles = (args.tokens + kGroupTokens - 1) / kGroupTokens * image.groups;
  if (tiles > INT32_MAX)
    return {KernelCode::kUnsupported, "block row group: too many tiles for one grid"};
  const Params<T> params{reinterpret_cast<const GroupSpan*>(base),
                         reinterpret_cast<const Step*>(base + image.steps_offset),
                         base + image.values_offset,
                         static_cast<int32_t>(image.groups),
                         static_cast<int32_t>(tiles),
                         OutputOf<T>(args)};
  const int64_t most = MultiprocessorCount() / kCluster;
  const int64_t clusters = tiles < most ? tiles : most;
  return Launch(ctx,
                {dim3(static_cast<unsigned>(kCluster * clusters)), kThreads,
                 Tile<kRows, kColumns>::kSharedBytes, kCluster, true},
                BlockRowGroupKernel<T, kRows, kColumns>, x_map, y_map, params);
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
  return args.io_dtype == DType::kBFloat16 ? RunTyped<BFloat16>(ctx, args)
                                           : RunTyped<Float16>(ctx, args);
}

}  // namespace espalier::kernels::cuda
