// block_linear_fma.cu — block_csr and diagonal blocks in strict fp32 on CUDA cores: every GPU from sm_80 on.
//
// Tensor cores have no fp32 operands, and a model in fp32 is served in fp32 unless its configuration says otherwise. One
// thread block computes one block row for a tile of tokens, walking the row's panels through a three-stage ring of
// cp.async copies. A thread has every RT-th row and every 16th token of the tile, kRowsEach × kTokensEach sums, and reads
// both operands four columns at a time: kRowsEach + kTokensEach loads of 16 bytes for kRowsEach · kTokensEach · 4
// products, so that from 2 × 4 sums on the multiplier is the limit. Rows in shared memory are padded by 16 bytes, which
// puts the eight tokens of a quarter warp's lanes into different banks.
#include "kernels/cuda/block_image.h"
#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/kernels.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kStages = 3;
constexpr int kTokenThreads = 16;

template <int kRows, int kColumns, int kTokens>
struct Tile {
  static constexpr int kRowThreads = kRows == 128 ? 16 : 8;
  static constexpr int kThreads = kRowThreads * kTokenThreads;
  static constexpr int kRowsEach = kRows / kRowThreads;
  static constexpr int kTokensEach = kTokens / kTokenThreads;
  static constexpr int kRowBytes = kColumns * 4 + 16;
  static constexpr int kXBytes = kTokens * kRowBytes;
  static constexpr int kStageBytes = kXBytes + kRows * kRowBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kChunks = kColumns / 4;  // 16-byte chunks a row
};

struct Params {
  const RowSpan* rows;
  const Panel* panels;
  const float* values;
  const float* x;
  int64_t x_stride;
  int64_t in;
  int32_t row_count;
  LinearOutput<float> to;
};

template <int kRows, int kColumns, int kTokens>
__device__ __forceinline__ void FillStage(const Params& params, int64_t token, int panel,
                                          uint32_t stage) {
  using Tile = Tile<kRows, kColumns, kTokens>;
  const int64_t column = params.panels[panel].column;
#pragma unroll
  for (int i = threadIdx.x; i < kTokens * Tile::kChunks; i += Tile::kThreads) {
    const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
    const int64_t left = token + row < params.to.tokens ? (params.in - column - 4 * chunk) * 4 : 0;
    const int bytes = static_cast<int>(left < 0 ? 0 : left > 16 ? 16 : left);
    const float* from =
        bytes > 0 ? params.x + (token + row) * params.x_stride + column + 4 * chunk : params.x;
    Copy16(stage + row * Tile::kRowBytes + chunk * 16, from, bytes);
  }
  const float* values = params.values + int64_t{panel} * kRows * kColumns;
#pragma unroll
  for (int i = threadIdx.x; i < kRows * Tile::kChunks; i += Tile::kThreads) {
    const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
    Copy16(stage + Tile::kXBytes + row * Tile::kRowBytes + chunk * 16, values + 4 * i, 16);
  }
}

__device__ __forceinline__ float4 LoadFloats(uint32_t address) {
  const uint4 words = LoadShared128(address);
  return {__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
          __uint_as_float(words.w)};
}

// Which rows and tokens of the tile a thread has: row + i · kRowThreads, token + i · kTokenThreads. A warp's lanes are 8
// tokens by 4 rows.
template <typename Tile>
struct Place {
  int row, token;
  __device__ __forceinline__ Place() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    token = warp % 2 * 8 + lane % 8;
    row = warp / 2 * 4 + lane / 8;
  }
};

template <int kRows, int kColumns, int kTokens>
__device__ __forceinline__ void MultiplyStage(
    float (&sums)[kRows / Tile<kRows, kColumns, kTokens>::kRowThreads][kTokens / kTokenThreads],
    uint32_t stage) {
  using Tile = Tile<kRows, kColumns, kTokens>;
  const Place<Tile> place;
  const uint32_t x = stage + place.token * Tile::kRowBytes;
  const uint32_t weight = stage + Tile::kXBytes + place.row * Tile::kRowBytes;
#pragma unroll 4
  for (int k = 0; k < kColumns; k += 4) {
    float4 of_token[Tile::kTokensEach];
#pragma unroll
    for (int j = 0; j < Tile::kTokensEach; ++j) {
      of_token[j] = LoadFloats(x + j * kTokenThreads * Tile::kRowBytes + k * 4);
    }
#pragma unroll
    for (int i = 0; i < Tile::kRowsEach; ++i) {
      const float4 of_row = LoadFloats(weight + i * Tile::kRowThreads * Tile::kRowBytes + k * 4);
#pragma unroll
      for (int j = 0; j < Tile::kTokensEach; ++j) {
        float& sum = sums[i][j];
        sum = fmaf(of_row.x, of_token[j].x, sum);
        sum = fmaf(of_row.y, of_token[j].y, sum);
        sum = fmaf(of_row.z, of_token[j].z, sum);
        sum = fmaf(of_row.w, of_token[j].w, sum);
      }
    }
  }
}

template <int kRows, int kColumns, int kTokens>
__global__ void __launch_bounds__(Tile<kRows, kColumns, kTokens>::kThreads)
    BlockFmaKernel(const Params params) {
  using Tile = Tile<kRows, kColumns, kTokens>;
  extern __shared__ __align__(16) char shared[];
  const uint32_t base = SharedAddress(shared);
  const RowSpan span = params.rows[blockIdx.x % params.row_count];
  const int64_t first_token = int64_t{blockIdx.x / params.row_count} * kTokens;
  const int count = span.end - span.begin;
  const auto fill = [&](int i) {
    if (i < count) {
      FillStage<kRows, kColumns, kTokens>(params, first_token, span.begin + i,
                                          base + i % kStages * Tile::kStageBytes);
    }
    CommitCopies();
  };

  float sums[Tile::kRowsEach][Tile::kTokensEach] = {};
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) fill(s);
  for (int i = 0; i < count; ++i) {
    WaitCopies<kStages - 2>();
    __syncthreads();  // stage i has arrived for all threads, and all have left stage i - 1
    fill(i + kStages - 1);
    MultiplyStage<kRows, kColumns, kTokens>(sums, base + i % kStages * Tile::kStageBytes);
  }

  const Place<Tile> place;
#pragma unroll
  for (int i = 0; i < Tile::kRowsEach; ++i) {
    const int64_t output = int64_t{span.row} * kRows + place.row + i * Tile::kRowThreads;
    if (output >= params.to.out) continue;
    const float bias = BiasAt(params.to.bias, output, params.to.out);
#pragma unroll
    for (int j = 0; j < Tile::kTokensEach; ++j) sums[i][j] += bias;
    if (params.to.residual != nullptr) {
#pragma unroll
      for (int j = 0; j < Tile::kTokensEach; ++j) {
        const int64_t token = first_token + place.token + j * kTokenThreads;
        if (token < params.to.tokens) sums[i][j] += ResidualAt(params.to, token, output);
      }
    }
    Activate<float>(sums[i], params.to.activation);
#pragma unroll
    for (int j = 0; j < Tile::kTokensEach; ++j) {
      const int64_t token = first_token + place.token + j * kTokenThreads;
      if (token < params.to.tokens) params.to.y[token * params.to.y_stride + output] = sums[i][j];
    }
  }
}

template <int kRows, int kColumns, int kTokens>
KernelStatus RunTile(const KernelContext& ctx, const LinearArgs& args) {
  using Tile = Tile<kRows, kColumns, kTokens>;
  const BlockImage image = BlockImageOf(args.weight);
  const char* base = static_cast<const char*>(args.weight.packed);
  const Params params{reinterpret_cast<const RowSpan*>(base + image.rows_offset),
                      reinterpret_cast<const Panel*>(base + image.panels_offset),
                      reinterpret_cast<const float*>(base + image.values_offset),
                      static_cast<const float*>(args.x),
                      args.x_stride,
                      args.weight.in,
                      static_cast<int32_t>(image.block_rows_count),
                      OutputOf<float>(args)};
  const int64_t tiles = (args.tokens + kTokens - 1) / kTokens * image.block_rows_count;
  if (tiles > INT32_MAX)
    return {KernelCode::kUnsupported, "block fma: too many tiles for one grid"};
  return Launch(ctx, {dim3(static_cast<unsigned>(tiles)), Tile::kThreads, Tile::kSharedBytes},
                BlockFmaKernel<kRows, kColumns, kTokens>, params);
}

template <int kRows, int kColumns>
KernelStatus RunShape(const KernelContext& ctx, const LinearArgs& args) {
  if (args.tokens <= 16) return RunTile<kRows, kColumns, 16>(ctx, args);
  if (args.tokens <= 64) return RunTile<kRows, kColumns, 64>(ctx, args);
  return RunTile<kRows, kColumns, 128>(ctx, args);
}

template <int kRows>
KernelStatus RunRows(const KernelContext& ctx, const LinearArgs& args) {
  return args.weight.block_cols == 16 ? RunShape<kRows, 16>(ctx, args)
                                      : RunShape<kRows, 32>(ctx, args);
}

}  // namespace

KernelStatus RunBlockFma(const KernelContext& ctx, const LinearArgs& args) {
  if (!FitsF32BlockImage(DescOfArgs(args))) {
    return {KernelCode::kUnsupported, "block fma: needs f32 blocks with sides 16, 32, 64, 128"};
  }
  if (KernelStatus status = CheckArgs(args); !status.ok() || args.tokens == 0) return status;
  switch (args.weight.block_rows) {
    case 16:
      return RunRows<16>(ctx, args);
    case 32:
      return RunRows<32>(ctx, args);
    case 64:
      return RunRows<64>(ctx, args);
    default:
      return RunRows<128>(ctx, args);
  }
}

}  // namespace espalier::kernels::cuda
