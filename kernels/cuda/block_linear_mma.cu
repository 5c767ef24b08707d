// block_linear_mma.cu — block_csr and diagonal blocks with mma.sync and cp.async: every GPU from sm_80 on.
//
// One thread block computes one block row for 128 tokens, walking the row's panels through a three-stage ring; each of
// the four warps takes 32 tokens and all outputs, so that a weight fragment is used twice per load.
#include "kernels/cuda/block_image.h"
#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/kernels.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kTileTokens = 128;
constexpr int kThreads = 128;
constexpr int kStages = 3;

template <int kRows, int kColumns>
struct Tile {
  static constexpr int kMask = SwizzleMask(kColumns);
  static constexpr int kXBytes = kTileTokens * kColumns * 2;
  static constexpr int kPanelBytes = kRows * kColumns * 2;
  static constexpr int kStageBytes = kXBytes + kPanelBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + kImageAlignment;
  static constexpr int kChunks = kColumns / 8;  // 16-byte chunks a row
};

template <typename T>
struct Params {
  const RowSpan* rows;
  const Panel* panels;
  const char* values;
  const T* x;
  int64_t x_stride;
  int64_t in;
  int32_t row_count;
  LinearOutput<T> to;
};

template <typename T, int kRows, int kColumns>
__device__ __forceinline__ void FillStage(const Params<T>& params, int64_t token, int panel,
                                          uint32_t stage) {
  using Tile = Tile<kRows, kColumns>;
  const int64_t column = params.panels[panel].column;
#pragma unroll
  for (int j = 0; j < Tile::kChunks; ++j) {
    const int i = threadIdx.x + j * kThreads;
    const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
    const int64_t left =
        (token + row < params.to.tokens) ? (params.in - column - 8 * chunk) * 2 : 0;
    const int bytes = static_cast<int>(left < 0 ? 0 : left > 16 ? 16 : left);
    const T* from =
        bytes > 0 ? params.x + (token + row) * params.x_stride + column + 8 * chunk : params.x;
    Copy16(stage + Swizzled(row * kColumns * 2 + chunk * 16, Tile::kMask), from, bytes);
  }
  const char* values = params.values + int64_t{panel} * Tile::kPanelBytes;
  for (int i = threadIdx.x * 16; i < Tile::kPanelBytes; i += kThreads * 16) {
    Copy16(stage + Tile::kXBytes + i, values + i, 16);
  }
}

template <typename T, int kRows, int kColumns>
__device__ __forceinline__ void MultiplyStage(float (&acc)[2][kRows / 2], uint32_t stage) {
  using Tile = Tile<kRows, kColumns>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
    uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int row = warp * 32 + m * 16 + lane % 16, chunk = 2 * k + lane / 16;
      LoadMatrices(a[m], stage + Swizzled(row * kColumns * 2 + chunk * 16, Tile::kMask));
    }
#pragma unroll
    for (int u = 0; u < kRows / 16; ++u) {
      const int row = 16 * u + lane % 8 + lane / 16 * 8, chunk = 2 * k + lane / 8 % 2;
      uint32_t b[4];
      LoadMatrices(b,
                   stage + Tile::kXBytes + Swizzled(row * kColumns * 2 + chunk * 16, Tile::kMask));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        Mma<T>(&acc[m][8 * u], a[m], b[0], b[1]);
        Mma<T>(&acc[m][8 * u + 4], a[m], b[2], b[3]);
      }
    }
  }
}

template <typename T, int kRows, int kColumns>
__global__ void __launch_bounds__(kThreads) BlockMmaKernel(const Params<T> params) {
  using Tile = Tile<kRows, kColumns>;
  extern __shared__ char shared[];
  const uint32_t base =
      (SharedAddress(shared) + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
  const RowSpan span = params.rows[blockIdx.x % params.row_count];
  const int64_t token = int64_t{blockIdx.x / params.row_count} * kTileTokens;
  const int count = span.end - span.begin;

  float acc[2][kRows / 2] = {};
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < count)
      FillStage<T, kRows, kColumns>(params, token, span.begin + s, base + s * Tile::kStageBytes);
    CommitCopies();
  }
  for (int i = 0; i < count; ++i) {
    WaitCopies<kStages - 2>();
    __syncthreads();  // stage i has arrived for all threads, and all have left stage i - 1
    const int next = i + kStages - 1;
    if (next < count) {
      FillStage<T, kRows, kColumns>(params, token, span.begin + next,
                                    base + next % kStages * Tile::kStageBytes);
    }
    CommitCopies();
    MultiplyStage<T, kRows, kColumns>(acc, base + i % kStages * Tile::kStageBytes);
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    StoreTokenRows(acc[m], params.to, token + threadIdx.x / 32 * 32 + m * 16,
                   int64_t{span.row} * kRows);
  }
}

template <typename T, int kRows, int kColumns>
KernelStatus RunShape(const KernelContext& ctx, const LinearArgs& args, const BlockImage& image) {
  const char* base = static_cast<const char*>(args.weight.packed);
  const Params<T> params{reinterpret_cast<const RowSpan*>(base + image.rows_offset),
                         reinterpret_cast<const Panel*>(base + image.panels_offset),
                         base + image.values_offset,
                         static_cast<const T*>(args.x),
                         args.x_stride,
                         args.weight.in,
                         static_cast<int32_t>(image.block_rows_count),
                         OutputOf<T>(args)};
  const int64_t tiles = (args.tokens + kTileTokens - 1) / kTileTokens * image.block_rows_count;
  if (tiles > INT32_MAX)
    return {KernelCode::kUnsupported, "block mma: too many tiles for one grid"};
  return Launch(ctx,
                {dim3(static_cast<unsigned>(tiles)), kThreads, Tile<kRows, kColumns>::kSharedBytes},
                BlockMmaKernel<T, kRows, kColumns>, params);
}

template <typename T, int kRows>
KernelStatus RunRows(const KernelContext& ctx, const LinearArgs& args, const BlockImage& image) {
  switch (image.panel_columns) {
    case 16:
      return RunShape<T, kRows, 16>(ctx, args, image);
    case 32:
      return RunShape<T, kRows, 32>(ctx, args, image);
    default:
      return RunShape<T, kRows, 64>(ctx, args, image);
  }
}

template <typename T>
KernelStatus RunTyped(const KernelContext& ctx, const LinearArgs& args, const BlockImage& image) {
  switch (args.weight.block_rows) {
    case 16:
      return RunRows<T, 16>(ctx, args, image);
    case 32:
      return RunRows<T, 32>(ctx, args, image);
    case 64:
      return RunRows<T, 64>(ctx, args, image);
    default:
      return RunRows<T, 128>(ctx, args, image);
  }
}

}  // namespace

KernelStatus RunBlockMma(const KernelContext& ctx, const LinearArgs& args) {
  if (!FitsBlockImage(DescOfArgs(args))) {
    return {KernelCode::kUnsupported, "block mma: needs 2-byte blocks with sides 16, 32, 64, 128"};
  }
  if (KernelStatus status = CheckArgs(args); !status.ok() || args.tokens == 0) return status;
  const BlockImage image = BlockImageOf(args.weight);
  return args.io_dtype == DType::kBFloat16 ? RunTyped<BFloat16>(ctx, args, image)
                                           : RunTyped<Float16>(ctx, args, image);
}

}  // namespace espalier::kernels::cuda
