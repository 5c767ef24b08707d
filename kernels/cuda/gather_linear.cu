// gather_linear.cu — csr and diagonal(1) on CUDA cores: every product multiplies one value of x from shared memory.
//
// One load of up to 16 bytes of x feeds the products of up to 8 tokens; a lane owns a row, or two (diagonals of 2-byte
// values), and sums them in registers, in fp32. What bounds it is shared memory (2 bytes a product, 4 in fp32) and the
// unpacking of 2-byte values, about 2.3 instructions a product.
#include "kernels/cuda/device/scattered.cuh"
#include "kernels/cuda/gather_image.h"
#include "kernels/cuda/kernels.h"

namespace espalier::kernels::cuda {
namespace {

enum class Format { kCsr, kDiagonal };

// sums[t] += weight · value t of the vector.
template <typename T, int kTokens>
__device__ __forceinline__ void Accumulate(float* sums, float weight,
                                           const Vector<T, kTokens>& vector) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
      sums[t] = fmaf(weight, __uint_as_float(vector.words[t]), sums[t]);
  } else if constexpr (kTokens == 1) {
    sums[0] = fmaf(weight, UnpackPair<T>(vector.words[0]).x, sums[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {
      const float2 pair = UnpackPair<T>(vector.words[i]);
      sums[2 * i] = fmaf(weight, pair.x, sums[2 * i]);
      sums[2 * i + 1] = fmaf(weight, pair.y, sums[2 * i + 1]);
    }
  }
}

template <typename T, Format kFormat, int kTokenCount>
struct Gather {
  static constexpr int kTokens = kTokenCount;
  static constexpr int kLaneRows = kFormat == Format::kDiagonal && sizeof(T) == 2 ? 2 : 1;
  static constexpr int kTileRows = 32 * kLaneRows;
  static constexpr int kBatch = 4;

  // Up to kBatch units of a tile, every `stride`-th from `first` on; what lies at or beyond `end` counts nothing.
  struct Batch {
    uint4 units[kBatch];
    uint2 starts[kBatch];
  };
  using Sums = float[kLaneRows][kTokens];

  __device__ __forceinline__ static int64_t RowOf(const ScatteredParams<T>&, int tile, int row) {
    return int64_t{tile} * kTileRows + row;
  }

  __device__ __forceinline__ static void Load(const ScatteredParams<T>& params, int first,
                                              int stride, int end, Batch& batch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int unit = first + i * stride;
      const uint32_t zeros = params.wrapped | static_cast<uint32_t>(params.wrapped)
                                                  << 16;  // two positions that hold 0
      constexpr bool kIsF32Csr = sizeof(T) == 4 && kFormat == Format::kCsr;
      constexpr int64_t kBytes = kIsF32Csr ? kF32CsrUnitBytes : kUnitBytes;
      const char* from = params.units + unit * kBytes;
      const int lane = threadIdx.x % 32;
      batch.units[i] = unit < end ? __ldg(reinterpret_cast<const uint4*>(from) + lane)
                       : kFormat == Format::kCsr && !kIsF32Csr ? make_uint4(zeros, zeros, 0, 0)
                                                               : make_uint4(0, 0, 0, 0);
      if constexpr (kFormat == Format::kDiagonal) {
        batch.starts[i] = unit < end ? __ldg(reinterpret_cast<const uint2*>(params.starts) + unit)
                                     : make_uint2(zeros, zeros);
      } else if constexpr (kIsF32Csr) {
        batch.starts[i] = unit < end ? __ldg(reinterpret_cast<const uint2*>(from + 512) + lane)
                                     : make_uint2(zeros, zeros);
      }
    }
  }

  __device__ __forceinline__ static void Multiply(const Batch& batch, const Vector<T, kTokens>* x,
                                                  Sums& sums) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t words[4] = {batch.units[i].x, batch.units[i].y, batch.units[i].z,
                                 batch.units[i].w};
      const uint32_t starts[2] = {batch.starts[i].x, batch.starts[i].y};
#pragma unroll
      for (int d = 0; d < kUnitEntries; ++d) {
        const uint32_t start = starts[d / 2] >> (16 * (d % 2)) & 0xffff;
        if constexpr (sizeof(T) == 4) {
          const uint32_t position = kFormat == Format::kCsr ? start : start + lane;
          Accumulate<T, kTokens>(sums[0], __uint_as_float(words[d]), x[position]);
        } else if constexpr (kFormat == Format::kCsr) {
          const uint32_t column = words[d / 2] >> (16 * (d % 2)) & 0xffff;
          const float2 pair = UnpackPair<T>(words[2 + d / 2]);
          Accumulate<T, kTokens>(sums[0], d % 2 == 0 ? pair.x : pair.y, x[column]);
        } else {
          const Vector<T, kTokens>* at = x + start + lane;
          const float2 pair = UnpackPair<T>(words[d]);
          Accumulate<T, kTokens>(sums[0], pair.x, at[0]);
          Accumulate<T, kTokens>(sums[1], pair.y, at[32]);
        }
      }
    }
  }

  template <typename Visitor>
  __device__ __forceinline__ static void Visit(const Sums& sums, Visitor visit) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) visit(r * 32 + threadIdx.x % 32, t, sums[r][t]);
    }
  }
};

// As many tokens at a time as there are and as fit.
template <typename T, Format kFormat, Share kShare>
KernelStatus RunShared(const KernelContext& ctx, const LinearArgs& args) {
  const GatherImage image = GatherImageOf(args.weight);
  const ScatteredParams<T> params = ScatteredParamsOf<T>(args, image);
  const auto fits = [&](size_t bytes) { return bytes <= kScatteredShared; };
  if (args.tokens > 4 &&
      fits(ScatteredSharedBytes<T, Gather<T, kFormat, 8>, kShare>(image.positions))) {
    return RunScattered<T, Gather<T, kFormat, 8>, kShare>(ctx, params);
  }
  if (args.tokens > 2 &&
      fits(ScatteredSharedBytes<T, Gather<T, kFormat, 4>, kShare>(image.positions))) {
    return RunScattered<T, Gather<T, kFormat, 4>, kShare>(ctx, params);
  }
  if (args.tokens > 1 &&
      fits(ScatteredSharedBytes<T, Gather<T, kFormat, 2>, kShare>(image.positions))) {
    return RunScattered<T, Gather<T, kFormat, 2>, kShare>(ctx, params);
  }
  return RunScattered<T, Gather<T, kFormat, 1>, kShare>(ctx, params);
}

template <Share kShare>
KernelStatus RunTyped(const KernelContext& ctx, const LinearArgs& args) {
  const bool is_csr = args.weight.layout == Layout::kCsr;
  if (args.io_dtype == DType::kFloat32) {
    return is_csr ? RunShared<float, Format::kCsr, kShare>(ctx, args)
                  : RunShared<float, Format::kDiagonal, kShare>(ctx, args);
  }
  if (args.io_dtype == DType::kBFloat16) {
    return is_csr ? RunShared<BFloat16, Format::kCsr, kShare>(ctx, args)
                  : RunShared<BFloat16, Format::kDiagonal, kShare>(ctx, args);
  }
  return is_csr ? RunShared<Float16, Format::kCsr, kShare>(ctx, args)
                : RunShared<Float16, Format::kDiagonal, kShare>(ctx, args);
}

KernelStatus Check(const LinearArgs& args) {
  if (!FitsGatherImage(DescOfArgs(args))) {
    return {KernelCode::kUnsupported,
            "gather: needs csr or diagonal(1) below 65,472 columns (f32: 49,153)"};
  }
  return CheckArgs(args);
}

}  // namespace

KernelStatus RunGatherStream(const KernelContext& ctx, const LinearArgs& args) {
  if (KernelStatus status = Check(args); !status.ok() || args.tokens == 0) return status;
  return RunTyped<Share::kStream4>(ctx, args);
}

KernelStatus RunGatherPairs(const KernelContext& ctx, const LinearArgs& args) {
  if (KernelStatus status = Check(args); !status.ok() || args.tokens == 0) return status;
  return RunTyped<Share::kStream2>(ctx, args);
}

KernelStatus RunGatherWhole(const KernelContext& ctx, const LinearArgs& args) {
  if (KernelStatus status = Check(args); !status.ok() || args.tokens == 0) return status;
  return RunTyped<Share::kWhole>(ctx, args);
}

}  // namespace espalier::kernels::cuda
