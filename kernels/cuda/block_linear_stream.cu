// block_linear_stream.cu — blocks for few tokens (up to 64) on Hopper: every weight byte is streamed once, at full speed.
//
// With few tokens a layer costs what its weights cost to read. The image's panels are one contiguous stream; each thread
// block takes an equal share of it, whatever rows it cuts, so that all multiprocessors finish together. One producer warp
// fills a ring with 16 KiB chunks of weights (bulk copies, issued BEFORE the wait on the previous kernel: weights do not
// depend on it) and with the x columns of each panel; eight consumer warps multiply with mma.sync, weights as the 16-row
// operand. A row that several thread blocks share is summed by the last of them to arrive, always in the order of the
// stream: the result does not depend on who is last.
//
// Scratch: tickets (zero before the first launch, left zero), then partial sums.
#include "kernels/cuda/block_image.h"
#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/pipeline.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/scratch.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kConsumerWarps = 8;
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kThreads = kConsumers + 32;
constexpr int kTableColumns = 1024;  // first columns of a thread block's panels that are loaded at once
// Two thread blocks fit a multiprocessor, so that the next layer's weights are on their way while this one ends.
constexpr int kSharedBudget = 112 * 1024;

template <int kRows, int kColumns, int kTokens>
struct Tile {
  static constexpr int kMask = SwizzleMask(kColumns);
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kChunkPanels = 16 * 1024 / kPanelBytes < 32 ? 16 * 1024 / kPanelBytes : 32;
  static constexpr int kWeightBytes = kChunkPanels * kPanelBytes;
  static constexpr int kBoxBytes = kTokens * kRowBytes;
  static constexpr int kMetaBytes = kChunkPanels * sizeof(Panel);
  // Boxes first: each starts at a multiple of its swizzle pattern (8 rows), panels do too.
  static constexpr int kStageBytes =
      (kWeightBytes + kChunkPanels * kBoxBytes + kMetaBytes + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
  static constexpr int kSlices = kRows / 16;                       // 16-row pieces of a panel, one a warp
  static constexpr int kParts = kConsumerWarps / kSlices;          // warps that share a slice, by products of 16 columns
  static constexpr int kProducts = kColumns / 16;
  static constexpr int kSums = kTokens / 2;                        // accumulators a thread
  static constexpr int kReduceBytes = kParts * kRows * kTokens * 4;
  static constexpr int kFixedBytes = kReduceBytes + 4 * kTableColumns + 2 * kImageAlignment;
  static constexpr int kFitting = (kSharedBudget - kFixedBytes) / kStageBytes;
  static constexpr int kStages = kFitting < 2 ? 2 : kFitting;
  static constexpr int kSharedBytes = kStages * kStageBytes + kFixedBytes;
  static_assert(kSharedBytes <= 227 * 1024 && kWeightBytes % kImageAlignment == 0);
};

template <typename T>
struct Params {
  const RowSpan* rows;
  const Panel* panels;
  const char* values;
  int32_t row_count;
  int32_t panel_count;
  uint32_t* tickets;
  float* partials;
  LinearOutput<T> to;
};

struct Shared {
  uint32_t stages;
  float* sums;
  int32_t* columns;
  RingBarriers barriers;
};

__device__ __forceinline__ void SyncConsumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

// Chunks are dealt out evenly: thread block c of n gets [c·chunks / n, (c + 1)·chunks / n).
__device__ __forceinline__ int FirstChunk(int block, int chunks) {
  return static_cast<int>(int64_t{block} * chunks / gridDim.x);
}
// The thread block that has `chunk`: the last c with c·chunks / n <= chunk.
__device__ __forceinline__ int OwnerOf(int chunk, int chunks) {
  return static_cast<int>(((int64_t{chunk} + 1) * gridDim.x - 1) / chunks);
}

template <typename T, int kRows, int kColumns, int kTokens>
struct Stream {
  using Tile = Tile<kRows, kColumns, kTokens>;

  const Params<T>& params;
  const Shared& shared;
  int chunks, begin, end;  // all chunks; this thread block's panels

  __device__ __forceinline__ Stream(const Params<T>& p, const Shared& s) : params(p), shared(s) {
    chunks = (p.panel_count + Tile::kChunkPanels - 1) / Tile::kChunkPanels;
    begin = FirstChunk(blockIdx.x, chunks) * Tile::kChunkPanels;
    end = min(FirstChunk(blockIdx.x + 1, chunks) * Tile::kChunkPanels, p.panel_count);
  }

  // Expects a chunk's bytes and copies its weights and panel descriptions.
  __device__ __forceinline__ void CopyWeights(int first, int stage) const {
    const int panels = min(Tile::kChunkPanels, end - first);
    const uint32_t to = shared.stages + stage * Tile::kStageBytes, full = shared.barriers.Full(stage);
    ArriveExpecting(full, panels * (Tile::kPanelBytes + Tile::kBoxBytes + static_cast<int>(sizeof(Panel))));
    CopyBulk(to, params.values + int64_t{first} * Tile::kPanelBytes, panels * Tile::kPanelBytes, full);
    CopyBulk(to + Tile::kWeightBytes + Tile::kChunkPanels * Tile::kBoxBytes, params.panels + first,
             panels * sizeof(Panel), full);
  }

  // One box of x a panel, a lane each.
  __device__ __forceinline__ void CopyX(const CUtensorMap* x_map, int first, int stage) const {
    const int lane = threadIdx.x % 32, panel = first + lane;
    if (lane >= Tile::kChunkPanels || panel >= end) return;
    const int index = panel - begin;
    const int column = index < kTableColumns ? shared.columns[index] : params.panels[panel].column;
    CopyBox(shared.stages + stage * Tile::kStageBytes + Tile::kWeightBytes + lane * Tile::kBoxBytes, x_map, column, 0,
            shared.barriers.Full(stage));
  }

  __device__ __forceinline__ void ProduceX(const CUtensorMap* x_map) const {
    RingPosition<Tile::kStages> ring;
    int i = 0;
    for (int first = begin; first < end; first += Tile::kChunkPanels, ++i) {
      if (i >= Tile::kStages) {  // the first round's weights are under way already
        Wait(shared.barriers.Empty(ring.stage), ring.parity ^ 1);
        if (threadIdx.x % 32 == 0) CopyWeights(first, ring.stage);
        __syncwarp();
      }
      CopyX(x_map, first, ring.stage);
      ring.Advance();
    }
  }

  // sums += one panel; this warp takes the 16-row slice `slice` and every kParts-th product of 16 columns.
  __device__ __forceinline__ void MultiplyPanel(float (&sums)[Tile::kSums], uint32_t weights, uint32_t x, int panel,
                                                int slice, int part) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < Tile::kProducts; ++k) {
      if ((panel * Tile::kProducts + k) % Tile::kParts != part) continue;
      uint32_t a[4];
      const int row = slice * 16 + lane % 16;
      LoadMatrices(a, weights + Swizzled(row * Tile::kRowBytes + k * 32 + lane / 16 * 16, Tile::kMask));
      if constexpr (kTokens == 8) {
        uint32_t b[2];
        LoadMatrices(b, x + Swizzled(lane % 8 * Tile::kRowBytes + k * 32 + lane / 8 % 2 * 16, Tile::kMask));
        Mma<T>(sums, a, b[0], b[1]);
      } else {
#pragma unroll
        for (int t = 0; t < kTokens / 16; ++t) {
          uint32_t b[4];
          const int token = t * 16 + lane % 8 + lane / 16 * 8;
          LoadMatrices(b, x + Swizzled(token * Tile::kRowBytes + k * 32 + lane / 8 % 2 * 16, Tile::kMask));
          Mma<T>(sums + 8 * t, a, b[0], b[1]);
          Mma<T>(sums + 8 * t + 4, a, b[2], b[3]);
        }
      }
    }
  }

  // Value (image row, token) of this thread's sums to shared memory, part by part.
  __device__ __forceinline__ void SpillSums(const float (&sums)[Tile::kSums], int slice, int part) const {
    const int lane = threadIdx.x % 32;
    float* to = shared.sums + (part * kRows + slice * 16 + lane / 4) * kTokens + lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < kTokens / 8; ++t) {
      *reinterpret_cast<float2*>(to + 8 * t) = make_float2(sums[4 * t], sums[4 * t + 1]);
      *reinterpret_cast<float2*>(to + 8 * kTokens + 8 * t) = make_float2(sums[4 * t + 2], sums[4 * t + 3]);
    }
  }

  __device__ __forceinline__ void Store(int64_t column, int token, float value) const {
    if (token >= params.to.tokens || column >= params.to.out) return;
    float one[1] = {value + BiasAt(params.to.bias, column, params.to.out)};
    Activate<T>(one, params.to.activation);
    params.to.y[token * params.to.y_stride + column] = FromFloat<T>(one[0]);
  }

  // Reduces the warps' sums of one block row and stores it, or hands it to the thread block that completes the row.
  __device__ __forceinline__ void Flush(const Panel& panel, const float (&sums)[Tile::kSums], int slice,
                                        int part) const {
    SpillSums(sums, slice, part);
    SyncConsumers();
    const bool whole = panel.begin >= begin && panel.end <= end;
    const int slot = 2 * blockIdx.x + (panel.begin < begin ? 0 : 1);
    for (int i = threadIdx.x; i < kRows * kTokens; i += kConsumers) {
      const int row = i % kRows, token = i / kRows;
      float value = 0.0f;
#pragma unroll
      for (int p = 0; p < Tile::kParts; ++p) value += shared.sums[(p * kRows + ImageRow(row)) * kTokens + token];
      if (whole) {
        Store(int64_t{panel.row} * kRows + row, token, value);
      } else {
        params.partials[int64_t{slot} * kRows * kTokens + i] = value;
      }
    }
    if (!whole) Combine(panel);
    SyncConsumers();  // the sums are read: the next row may overwrite them
  }

  // The last of the thread blocks that share a row adds up what all of them left.
  __device__ __forceinline__ void Combine(const Panel& panel) const {
    const int first = OwnerOf(panel.begin / Tile::kChunkPanels, chunks);
    const int last = OwnerOf((panel.end - 1) / Tile::kChunkPanels, chunks);
    __threadfence();
    SyncConsumers();
    uint32_t* arrived = reinterpret_cast<uint32_t*>(shared.sums);
    if (threadIdx.x == 0) *arrived = atomicAdd(params.tickets + first, 1u);
    SyncConsumers();
    if (*arrived != static_cast<uint32_t>(last - first)) return;
    __threadfence();
    for (int i = threadIdx.x; i < kRows * kTokens; i += kConsumers) {
      float value = 0.0f;
      for (int block = first; block <= last; ++block) {
        const int slot = 2 * block + (block == first ? 1 : 0);
        value += __ldcg(params.partials + int64_t{slot} * kRows * kTokens + i);
      }
      Store(int64_t{panel.row} * kRows + i % kRows, i / kRows, value);
    }
    if (threadIdx.x == 0) params.tickets[first] = 0;
  }

  // Rows without panels are bias alone; they come last in the row list.
  __device__ __forceinline__ void StoreEmptyRows() const {
    for (int r = params.row_count - 1 - blockIdx.x; r >= 0; r -= gridDim.x) {
      const RowSpan span = params.rows[r];
      if (span.begin != span.end) return;
      for (int i = threadIdx.x; i < kRows * kTokens; i += kConsumers) {
        Store(int64_t{span.row} * kRows + i % kRows, i / kRows, 0.0f);
      }
    }
  }

  __device__ __forceinline__ void Consume() const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int slice = warp % Tile::kSlices, part = warp / Tile::kSlices;
    RingPosition<Tile::kStages> ring;
    float sums[Tile::kSums] = {};
    Panel current{0, -1, 0, 0};
    for (int first = begin; first < end; first += Tile::kChunkPanels) {
      Wait(shared.barriers.Full(ring.stage), ring.parity);
      const uint32_t stage = shared.stages + ring.stage * Tile::kStageBytes;
      const int panels = min(Tile::kChunkPanels, end - first);
      for (int i = 0; i < panels; ++i) {
        const uint4 words =
            LoadShared128(stage + Tile::kWeightBytes + Tile::kChunkPanels * Tile::kBoxBytes + i * sizeof(Panel));
        const Panel panel{static_cast<int>(words.x), static_cast<int>(words.y), static_cast<int>(words.z),
                          static_cast<int>(words.w)};
        if (panel.row != current.row) {
          if (current.row >= 0) Flush(current, sums, slice, part);
#pragma unroll
          for (int s = 0; s < Tile::kSums; ++s) sums[s] = 0.0f;
          current = panel;
        }
        MultiplyPanel(sums, stage + i * Tile::kPanelBytes, stage + Tile::kWeightBytes + i * Tile::kBoxBytes, first + i,
                      slice, part);
      }
      __syncwarp();
      if (lane == 0) Arrive(shared.barriers.Empty(ring.stage));
      ring.Advance();
    }
    if (current.row >= 0) Flush(current, sums, slice, part);
  }
};

template <typename T, int kRows, int kColumns, int kTokens>
__global__ void __launch_bounds__(kThreads, 1)
    BlockStreamKernel(const __grid_constant__ CUtensorMap x_map, const Params<T> params) {
  using Tile = Tile<kRows, kColumns, kTokens>;
  extern __shared__ char dynamic_shared[];
  const uint32_t raw = SharedAddress(dynamic_shared);
  Shared shared;
  shared.stages = (raw + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
  char* after = dynamic_shared + (shared.stages - raw) + Tile::kStages * Tile::kStageBytes;
  shared.sums = reinterpret_cast<float*>(after);
  shared.columns = reinterpret_cast<int32_t*>(after + Tile::kReduceBytes);
  shared.barriers.full = SharedAddress(after) + Tile::kReduceBytes + 4 * kTableColumns;
  shared.barriers.empty = shared.barriers.full + 8 * Tile::kStages;
  const Stream<T, kRows, kColumns, kTokens> stream(params, shared);

  if (threadIdx.x == kConsumers) {
    InitRing(shared.barriers, Tile::kStages, kConsumerWarps);
    for (int s = 0; s < Tile::kStages; ++s) {
      const int first = stream.begin + s * Tile::kChunkPanels;
      if (first < stream.end) stream.CopyWeights(first, s);
    }
  }
  ReleaseSuccessors();
  for (int i = threadIdx.x; i < min(stream.end - stream.begin, kTableColumns); i += kThreads) {
    shared.columns[i] = params.panels[stream.begin + i].column;
  }
  __syncthreads();
  WaitForPredecessors();
  if (threadIdx.x >= kConsumers) {
    stream.ProduceX(&x_map);
  } else {
    stream.StoreEmptyRows();
    stream.Consume();
  }
}

template <typename T, int kRows, int kColumns, int kTokens>
KernelStatus RunTokens(const KernelContext& ctx, const LinearArgs& args) {
  using Tile = Tile<kRows, kColumns, kTokens>;
  const BlockImage image = BlockImageOf(args.weight);
  CUtensorMap x_map;
  if (KernelStatus status = MakeTensorMap(&x_map, args.io_dtype, args.x, args.tokens, args.weight.in, args.x_stride,
                                          kTokens, kColumns);
      !status.ok()) {
    return status;
  }
  if (args.scratch == nullptr) return {KernelCode::kInvalidArgument, "block stream: scratch must not be null"};
  const char* base = static_cast<const char*>(args.weight.packed);
  char* scratch = static_cast<char*>(args.scratch);
  const Params<T> params{reinterpret_cast<const RowSpan*>(base + image.rows_offset),
                         reinterpret_cast<const Panel*>(base + image.panels_offset),
                         base + image.values_offset,
                         static_cast<int32_t>(image.block_rows_count),
                         static_cast<int32_t>(image.panels),
                         reinterpret_cast<uint32_t*>(scratch),
                         reinterpret_cast<float*>(scratch + kTicketBytes),
                         OutputOf<T>(args)};
  int64_t blocks = (image.panels + Tile::kChunkPanels - 1) / Tile::kChunkPanels;
  const int most = MultiprocessorCount() < kMaxStreamBlocks ? MultiprocessorCount() : kMaxStreamBlocks;
  blocks = blocks < 1 ? 1 : blocks < most ? blocks : most;
  return Launch(BlockStreamKernel<T, kRows, kColumns, kTokens>, dim3(static_cast<unsigned>(blocks)), kThreads,
                Tile::kSharedBytes, ctx.stream, true, x_map, params);
}

template <typename T, int kRows, int kColumns>
KernelStatus RunShape(const KernelContext& ctx, const LinearArgs& args) {
  if (args.tokens <= 8) return RunTokens<T, kRows, kColumns, 8>(ctx, args);
  if (args.tokens <= 16) return RunTokens<T, kRows, kColumns, 16>(ctx, args);
  if (args.tokens <= 32) return RunTokens<T, kRows, kColumns, 32>(ctx, args);
  return RunTokens<T, kRows, kColumns, 64>(ctx, args);
}

template <typename T>
KernelStatus RunTyped(const KernelContext& ctx, const LinearArgs& args) {
  switch (args.weight.block_rows) {
    case 16: return RunShape<T, 16, 16>(ctx, args);
    case 32: return RunShape<T, 32, 32>(ctx, args);
    case 64: return RunShape<T, 64, 64>(ctx, args);
    default: return RunShape<T, 128, 64>(ctx, args);
  }
}

}  // namespace

KernelStatus RunBlockStream(const KernelContext& ctx, const LinearArgs& args) {
  if (!FitsBlockStream(DescOfArgs(args))) {
    return {KernelCode::kUnsupported, "block stream: needs square 2-byte blocks of 16 to 128 and at most 64 tokens"};
  }
  if (KernelStatus status = CheckArgs(args); !status.ok() || args.tokens == 0) return status;
  return args.io_dtype == DType::kBFloat16 ? RunTyped<BFloat16>(ctx, args) : RunTyped<Float16>(ctx, args);
}

}  // namespace espalier::kernels::cuda
