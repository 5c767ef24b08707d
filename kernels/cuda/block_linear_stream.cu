// block_linear_stream.cu — blocks for few tokens (up to 32) on Hopper: every weight byte is streamed once, at full speed.
//
// With few tokens a layer costs what its weights cost to read, and then what it takes to put the sums together. The image's
// panels are one contiguous stream. Each cluster of four thread blocks takes whole block rows, an equal share of the stream
// up to half a row; inside it each thread block takes a quarter of the panels, whatever rows that cuts. One producer warp
// fills a ring with chunks of weights (bulk copies, issued BEFORE the wait on the previous kernel: weights do not depend
// on it) and with the x columns of each panel; eight consumer warps multiply with mma.sync, weights as the 16-row operand.
// The thread block in which a row begins receives the other parts in its shared memory and adds them in the order of the
// stream, so that the result does not depend on timing.
//
// H200, 10,240², 90 %, b = 64, 16 tokens: sums through global memory and a counter instead took 14.6 µs, this way 12.0.
#include "kernels/cuda/block_image.h"
#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/pipeline.cuh"
#include "kernels/cuda/kernels.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kCluster = 4;
constexpr int kConsumerWarps = 8;
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kThreads = kConsumers + 32;
constexpr int kTableColumns =
    512;  // first columns of a thread block's panels that are loaded at once
constexpr int kSharedLimit = 227 * 1024;

template <int kRows, int kColumns, int kTokens>
struct Tile {
  static constexpr int kMask = SwizzleMask(kColumns);
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kChunkPanels = 16 * 1024 / kPanelBytes < 32 ? 16 * 1024 / kPanelBytes : 32;
  static constexpr int kWeightBytes = kChunkPanels * kPanelBytes;
  static constexpr int kBoxBytes = kTokens * kRowBytes;
  static constexpr int kMetaBytes = kChunkPanels * sizeof(Panel);
  // Panels, then boxes: each starts at a multiple of its swizzle pattern (8 rows).
  static constexpr int kStageBytes =
      (kWeightBytes + kChunkPanels * kBoxBytes + kMetaBytes + kImageAlignment - 1) /
      kImageAlignment * kImageAlignment;
  static constexpr int kSlices = kRows / 16;  // 16-row pieces of a panel, one a warp
  static constexpr int kParts =
      kConsumerWarps / kSlices;  // warps that share a slice, by products of 16 columns
  static constexpr int kProducts = kColumns / 16;
  static constexpr int kSums = kTokens / 2;  // accumulators a thread
  // Sums of one token lie together, rows padded so that a warp's fragments fall into different banks.
  static constexpr int kSumStride = kRows + 4;
  static constexpr int kReduceBytes = kParts * kTokens * kSumStride * 4;
  static constexpr int kPartBytes = kRows * kTokens * 4;  // one thread block's part of a shared row
  static constexpr int kFixedBytes =
      kReduceBytes + kCluster * kPartBytes + 4 * kTableColumns + 2 * kImageAlignment;
  // Half of the memory where that is enough for four stages: then the next layer's thread block fits beside this one, and
  // its weights are on their way while this one ends (10,240², one token: 9.7 µs; a ring of the whole memory 11.6 µs).
  static constexpr int kHalf = (kSharedLimit / 2 - kImageAlignment - kFixedBytes) / kStageBytes;
  static constexpr int kWhole = (kSharedLimit - kFixedBytes) / kStageBytes;
  static constexpr int kStages = kHalf >= 4 ? kHalf : kWhole < 8 ? kWhole : 8;
  static constexpr int kSharedBytes = kStages * kStageBytes + kFixedBytes;
  static_assert(kStages >= 2 && kWeightBytes % kImageAlignment == 0);
};

template <typename T>
struct Params {
  const RowSpan* rows;
  const Panel* panels;
  const char* values;
  int32_t row_count;
  int32_t panel_count;
  LinearOutput<T> to;
};

struct Shared {
  uint32_t stages;
  float* sums;
  float*
      parts;  // [kCluster]: this thread block's own part of the row it begins, then those of its followers
  int32_t* columns;
  RingBarriers barriers;
};

// Where the share of cluster `cluster` begins: the row boundary nearest to an equal share of the panels.
__device__ __forceinline__ int ShareBegin(const Panel* panels, int panel_count, int cluster,
                                          int clusters) {
  if (cluster == clusters) return panel_count;
  const int even = static_cast<int>(int64_t{cluster} * panel_count / clusters);
  if (even == 0) return 0;
  const Panel panel = panels[even];
  return even - panel.begin <= panel.end - even ? panel.begin : panel.end;
}

template <typename T, int kRows, int kColumns, int kTokens>
struct Stream {
  using Tile = Tile<kRows, kColumns, kTokens>;

  const Params<T>& params;
  const Shared& shared;
  int rank;
  int share, share_panels;  // the cluster's panels are [share, share + share_panels)
  int begin, end;           // this thread block's

  __device__ __forceinline__ Stream(const Params<T>& p, const Shared& s) : params(p), shared(s) {
    const int clusters = gridDim.x / kCluster, cluster = blockIdx.x / kCluster;
    rank = blockIdx.x % kCluster;
    share = ShareBegin(p.panels, p.panel_count, cluster, clusters);
    share_panels = ShareBegin(p.panels, p.panel_count, cluster + 1, clusters) - share;
    begin = BeginOf(rank);
    end = BeginOf(rank + 1);
  }

  __device__ __forceinline__ int BeginOf(int r) const {
    return share + r * share_panels / kCluster;
  }

  // The thread block of the cluster that has `panel`: the last r with r · share_panels / kCluster <= panel − share.
  __device__ __forceinline__ int RankOf(int panel) const {
    return ((panel - share + 1) * kCluster - 1) / share_panels;
  }

  // Expects a chunk's bytes and copies its weights and panel descriptions.
  __device__ __forceinline__ void CopyWeights(int first, int stage) const {
    const int panels = min(Tile::kChunkPanels, end - first);
    const uint32_t to = shared.stages + stage * Tile::kStageBytes,
                   full = shared.barriers.Full(stage);
    ArriveExpecting(
        full, panels * (Tile::kPanelBytes + Tile::kBoxBytes + static_cast<int>(sizeof(Panel))));
    CopyBulk(to, params.values + int64_t{first} * Tile::kPanelBytes, panels * Tile::kPanelBytes,
             full);
    CopyBulk(to + Tile::kWeightBytes + Tile::kChunkPanels * Tile::kBoxBytes, params.panels + first,
             panels * sizeof(Panel), full);
  }

  // One box of x a panel, a lane each.
  __device__ __forceinline__ void CopyX(const CUtensorMap* x_map, int first, int stage) const {
    const int lane = threadIdx.x % 32, panel = first + lane;
    if (lane >= Tile::kChunkPanels || panel >= end) return;
    const int index = panel - begin;
    const int column = index < kTableColumns ? shared.columns[index] : params.panels[panel].column;
    CopyBox(shared.stages + stage * Tile::kStageBytes + Tile::kWeightBytes + lane * Tile::kBoxBytes,
            x_map, column, 0, shared.barriers.Full(stage));
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

  // sums += panels [from, to) of a chunk. The products of 16 columns are dealt out to the warps of a slice in turn.
  __device__ __forceinline__ void MultiplyPanels(float (&sums)[Tile::kSums], uint32_t stage,
                                                 int from, int to, int slice, int part) const {
    constexpr int kP = Tile::kProducts, kQ = Tile::kParts;  // powers of two
    const int lane = threadIdx.x % 32;
    const int a_row = (slice * 16 + lane % 16) * Tile::kRowBytes;
    const int b_row = (kTokens == 8 ? lane % 8 : lane % 8 + lane / 16 * 8) * Tile::kRowBytes;
    const int a_key = (a_row >> 3) & Tile::kMask, b_key = (b_row >> 3) & Tile::kMask;
    const int a_half = lane / 16 * 16, b_half = lane / 8 % 2 * 16;
    const uint32_t a_base = stage + a_row, b_base = stage + Tile::kWeightBytes + b_row;
#pragma unroll 4
    for (int unit = from * kP + ((part - from * kP) & (kQ - 1)); unit < to * kP; unit += kQ) {
      const int panel = unit / kP, k = unit % kP * 32;
      uint32_t a[4];
      LoadMatrices(a, a_base + panel * Tile::kPanelBytes + ((k + a_half) ^ a_key));
      const uint32_t x = b_base + panel * Tile::kBoxBytes + ((k + b_half) ^ b_key);
      if constexpr (kTokens == 8) {
        uint32_t b[2];
        LoadMatrices(b, x);
        Mma<T>(sums, a, b[0], b[1]);
      } else {
#pragma unroll
        for (int t = 0; t < kTokens / 16; ++t) {
          uint32_t b[4];
          LoadMatrices(b, x + t * 16 * Tile::kRowBytes);
          Mma<T>(sums + 8 * t, a, b[0], b[1]);
          Mma<T>(sums + 8 * t + 4, a, b[2], b[3]);
        }
      }
    }
  }

  // This thread's sums to shared memory, part by part.
  __device__ __forceinline__ void SpillSums(const float (&sums)[Tile::kSums], int slice,
                                            int part) const {
    const int lane = threadIdx.x % 32;
    float* to =
        shared.sums + (part * kTokens + lane % 4 * 2) * Tile::kSumStride + slice * 16 + lane / 4;
#pragma unroll
    for (int t = 0; t < kTokens / 8; ++t, to += 8 * Tile::kSumStride) {
      to[0] = sums[4 * t];
      to[Tile::kSumStride] = sums[4 * t + 1];
      to[8] = sums[4 * t + 2];
      to[Tile::kSumStride + 8] = sums[4 * t + 3];
    }
  }

  // Sum i of a block row is that of row i % kRows and token i / kRows.
  __device__ __forceinline__ int SumCount() const {
    return kRows * static_cast<int>(params.to.tokens);
  }

  __device__ __forceinline__ void Store(int block_row, int i, float value) const {
    const int64_t column = int64_t{block_row} * kRows + i % kRows;
    if (column >= params.to.out) return;
    const int64_t token = i / kRows;
    float one[1] = {value + BiasAt(params.to.bias, column, params.to.out) +
                    ResidualAt(params.to, token, column)};
    Activate<T>(one, params.to.activation);
    params.to.y[token * params.to.y_stride + column] = FromFloat<T>(one[0]);
  }

  // Reduces the warps' sums of one block row and stores them, or passes them to the thread block in which the row begins.
  __device__ __forceinline__ void Flush(const Panel& row, const float (&sums)[Tile::kSums],
                                        int slice, int part) const {
    SpillSums(sums, slice, part);
    SyncThreads(1, kConsumers);
    const bool begins = row.begin >= begin, whole = begins && row.end <= end;
    const int owner = begins ? rank : RankOf(row.begin);
    const uint32_t part_address =
        ClusterAddress(SharedAddress(shared.parts) + (rank - owner) * Tile::kPartBytes, owner);
    for (int i = threadIdx.x; i < SumCount(); i += kConsumers) {
      float value = 0.0f;
#pragma unroll
      for (int p = 0; p < Tile::kParts; ++p) {
        value += shared.sums[(p * kTokens + i / kRows) * Tile::kSumStride + i % kRows];
      }
      if (whole) {
        Store(row.row, i, value);
      } else {
        StoreToCluster(part_address + 4 * i, value);
      }
    }
    SyncThreads(1, kConsumers);  // the sums are read: the next row may overwrite them
  }

  // Adds up the parts of the row that begins here and ends in another thread block.
  __device__ __forceinline__ void Combine(const Panel& row) const {
    const int last = RankOf(row.end - 1);
    for (int i = threadIdx.x; i < SumCount(); i += kConsumers) {
      float value = 0.0f;
      for (int r = rank; r <= last; ++r) {
        if (BeginOf(r) < BeginOf(r + 1)) value += shared.parts[(r - rank) * kRows * kTokens + i];
      }
      Store(row.row, i, value);
    }
  }

  // Rows without panels are bias alone; they come last in the row list.
  __device__ __forceinline__ void StoreEmptyRows() const {
    for (int r = params.row_count - 1 - blockIdx.x; r >= 0; r -= gridDim.x) {
      const RowSpan span = params.rows[r];
      if (span.begin != span.end) return;
      for (int i = threadIdx.x; i < SumCount(); i += kConsumers) Store(span.row, i, 0.0f);
    }
  }

  __device__ __forceinline__ Panel PanelIn(uint32_t stage, int i) const {
    const uint4 words = LoadShared128(stage + Tile::kWeightBytes +
                                      Tile::kChunkPanels * Tile::kBoxBytes + i * sizeof(Panel));
    return {static_cast<int>(words.x), static_cast<int>(words.y), static_cast<int>(words.z),
            static_cast<int>(words.w)};
  }

  // Returns the last row, which other thread blocks may have parts of.
  __device__ __forceinline__ Panel Consume() const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int slice = warp % Tile::kSlices, part = warp / Tile::kSlices;
    RingPosition<Tile::kStages> ring;
    float sums[Tile::kSums] = {};
    Panel current{0, -1, 0, 0};
    for (int first = begin; first < end; first += Tile::kChunkPanels) {
      Wait(shared.barriers.Full(ring.stage), ring.parity);
      const uint32_t stage = shared.stages + ring.stage * Tile::kStageBytes;
      const int panels = min(Tile::kChunkPanels, end - first);
      // Lane i looks at panel i: where do rows begin?
      const int row = lane < panels ? PanelIn(stage, lane).row : current.row;
      const int before = __shfl_up_sync(0xffffffffu, row, 1);
      const uint32_t begins =
          __ballot_sync(0xffffffffu, lane < panels && row != (lane == 0 ? current.row : before));
      for (int from = 0; from < panels;) {
        if (begins >> from & 1) {
          if (current.row >= 0) Flush(current, sums, slice, part);
#pragma unroll
          for (int i = 0; i < Tile::kSums; ++i) sums[i] = 0.0f;
          current = PanelIn(stage, from);
        }
        const uint32_t later = from == 31 ? 0 : begins >> (from + 1) << (from + 1);
        const int to = later == 0 ? panels : __ffs(later) - 1;
        MultiplyPanels(sums, stage, from, to, slice, part);
        from = to;
      }
      __syncwarp();
      if (lane == 0) Arrive(shared.barriers.Empty(ring.stage));
      ring.Advance();
    }
    if (current.row >= 0) Flush(current, sums, slice, part);
    return current;
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
  shared.parts = reinterpret_cast<float*>(after + Tile::kReduceBytes);
  shared.columns =
      reinterpret_cast<int32_t*>(after + Tile::kReduceBytes + kCluster * Tile::kPartBytes);
  shared.barriers.full = SharedAddress(shared.columns + kTableColumns);
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
  MeetCluster();  // every thread block of the cluster is there before the first part is passed
  WaitForPredecessors();
  Panel last{0, -1, 0, 0};
  if (threadIdx.x >= kConsumers) {
    stream.ProduceX(&x_map);
  } else {
    stream.StoreEmptyRows();
    last = stream.Consume();
  }
  SyncCluster();  // all parts have arrived
  if (threadIdx.x < kConsumers && last.row >= 0 && last.begin >= stream.begin &&
      last.end > stream.end) {
    stream.Combine(last);
  }
}

template <typename T, int kRows, int kColumns, int kTokens>
KernelStatus RunTokens(const KernelContext& ctx, const LinearArgs& args) {
  using Tile = Tile<kRows, kColumns, kTokens>;
  const BlockImage image = BlockImageOf(args.weight);
  CUtensorMap x_map;
  KernelStatus status = MakeTensorMap(&x_map, args.io_dtype, args.x, args.tokens, args.weight.in,
                                      args.x_stride, kTokens, kColumns);
  if (!status.ok()) return status;
  const char* base = static_cast<const char*>(args.weight.packed);
  const Params<T> params{reinterpret_cast<const RowSpan*>(base + image.rows_offset),
                         reinterpret_cast<const Panel*>(base + image.panels_offset),
                         base + image.values_offset,
                         static_cast<int32_t>(image.block_rows_count),
                         static_cast<int32_t>(image.panels),
                         OutputOf<T>(args)};
  const auto kernel = BlockStreamKernel<T, kRows, kColumns, kTokens>;
  // As many clusters as there is room for with a multiprocessor a thread block (a graphics cluster of 18 has two left
  // over), but no thread block without a chunk of its own.
  int most = 0;
  status = ActiveClusters(reinterpret_cast<const void*>(kernel), kCluster, kThreads,
                          kSharedLimit - kImageAlignment, &most);
  if (!status.ok()) return status;
  const int64_t wanted = image.panels / (kCluster * Tile::kChunkPanels);
  const int64_t clusters = wanted < 1 ? 1 : wanted < most ? wanted : most;
  return Launch(ctx,
                {dim3(static_cast<unsigned>(clusters * kCluster)), kThreads, Tile::kSharedBytes,
                 kCluster, true},
                kernel, x_map, params);
}

template <typename T, int kRows, int kColumns>
KernelStatus RunShape(const KernelContext& ctx, const LinearArgs& args) {
  if (args.tokens <= 8) return RunTokens<T, kRows, kColumns, 8>(ctx, args);
  if (args.tokens <= 16) return RunTokens<T, kRows, kColumns, 16>(ctx, args);
  return RunTokens<T, kRows, kColumns, 32>(ctx, args);
}

template <typename T>
KernelStatus RunTyped(const KernelContext& ctx, const LinearArgs& args) {
  switch (args.weight.block_rows) {
    case 16:
      return RunShape<T, 16, 16>(ctx, args);
    case 32:
      return RunShape<T, 32, 32>(ctx, args);
    case 64:
      return RunShape<T, 64, 64>(ctx, args);
    default:
      return RunShape<T, 128, 64>(ctx, args);
  }
}

}  // namespace

KernelStatus RunBlockStream(const KernelContext& ctx, const LinearArgs& args) {
  if (!FitsBlockStream(DescOfArgs(args))) {
    return {KernelCode::kUnsupported,
            "block stream: needs square 2-byte blocks of 16 to 128 and at most 32 tokens"};
  }
  if (KernelStatus status = CheckArgs(args); !status.ok() || args.tokens == 0) return status;
  return args.io_dtype == DType::kBFloat16 ? RunTyped<BFloat16>(ctx, args)
                                           : RunTyped<Float16>(ctx, args);
}

}  // namespace espalier::kernels::cuda
