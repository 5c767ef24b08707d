// gather_linear.cu — csr and diagonal(1): x of a few tokens lies in shared memory, the weights stream past it.
//
// Position i of x (gather_image.h) is kept as the values of kTokens tokens side by side, so that one load of up to 16 bytes
// feeds kTokens products; a lane owns a row (csr) or two (diagonal) and sums them in registers, in fp32. Two ways to share
// the work:
//   kStream  few tokens: a cluster of four (kStream4) or two (kStream2) thread blocks takes a tile, each of its warps every
//            64th or 32nd unit of it; the sums meet in the shared memory of one of the thread blocks. The first weights are
//            asked for before the wait on the previous kernel.
//   kWhole   any number of tokens: a warp takes whole tiles, a thread block one group of kTokens tokens at a time.
// What bounds it is shared memory (2 bytes a product, 4 in fp32) and the unpacking of 2-byte values, about 2.3 instructions
// a product.
#include <type_traits>

#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/gather_image.h"
#include "kernels/cuda/kernels.h"

namespace espalier::kernels::cuda {
namespace {

enum class Format { kCsr, kDiagonal };
enum class Share { kStream4, kStream2, kWhole };

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kBatch = 4;  // units a warp has in flight
constexpr size_t kSharedLimit = 227 * 1024;

constexpr int ClusterOf(Share share) {
  return share == Share::kStream4 ? 4 : share == Share::kStream2 ? 2 : 1;
}
// Rows of a tile that a lane has.
template <typename T>
constexpr int LaneRows(Format format) {
  return format == Format::kDiagonal && sizeof(T) == 2 ? 2 : 1;
}
template <typename T>
constexpr int TileRows(Format format) {
  return 32 * LaneRows<T>(format);
}

template <typename T>
struct Params {
  const int32_t* tiles;
  const uint2* starts;  // four 16-bit positions a unit
  const char* units;
  const T* x;
  int64_t x_stride;
  int32_t in, modulus, wrapped, positions;  // of x in shared memory: gather_image.h
  int32_t tile_count;
  int32_t groups, parts;  // of tokens; of tiles, for each group
  LinearOutput<T> to;
};

// The values of kTokens tokens.
template <typename T, int kTokens>
struct alignas(kTokens * sizeof(T) < 16 ? kTokens * sizeof(T) : 16) Vector {
  using Word = std::conditional_t<(kTokens * sizeof(T) < 4), uint16_t, uint32_t>;
  Word words[kTokens * sizeof(T) / sizeof(Word)];
};

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

// Columns that a thread transposes at a time: together with kTokens tokens at least 32 bytes to store.
constexpr int FillColumns(int tokens) { return tokens == 8 ? 2 : tokens == 4 ? 4 : 8; }

// kColumns neighbouring values as 32-bit words; `from` is aligned to them.
template <int kColumns>
__device__ __forceinline__ void LoadColumns(uint32_t (&words)[kColumns / 2], const uint16_t* from) {
  if constexpr (kColumns == 2) {
    words[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
  } else if constexpr (kColumns == 4) {
    const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
    words[0] = two.x, words[1] = two.y;
  } else {
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(from));
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  }
}

// FillX for 2-byte values.
template <typename T, int kTokens>
__device__ __forceinline__ void FillPairs(const Params<T>& params, int64_t token,
                                          Vector<T, kTokens>* x) {
  constexpr int kColumns = FillColumns(kTokens);
  const uint16_t* from = reinterpret_cast<const uint16_t*>(params.x) + token * params.x_stride;
  const int present = static_cast<int>(min(int64_t{kTokens}, params.to.tokens - token));
  const int whole = min(params.in, params.modulus) / kColumns * kColumns;
#pragma unroll 2
  for (int first = threadIdx.x * kColumns; first < whole; first += kThreads * kColumns) {
    uint32_t rows[kTokens][kColumns / 2];  // two columns a word
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t < present) {
        LoadColumns<kColumns>(rows[t], from + t * params.x_stride + first);
      } else {
#pragma unroll
        for (int w = 0; w < kColumns / 2; ++w) rows[t][w] = 0;
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      Vector<T, kTokens> vector;
      if constexpr (kTokens == 1) {
        vector.words[0] = static_cast<uint16_t>(rows[0][c / 2] >> (16 * (c % 2)));
      } else {
#pragma unroll
        for (int w = 0; w < kTokens / 2; ++w) {
          vector.words[w] =
              __byte_perm(rows[2 * w][c / 2], rows[2 * w + 1][c / 2], c % 2 == 0 ? 0x5410 : 0x7632);
        }
      }
      x[first + c] = vector;
    }
  }
  for (int i = whole + threadIdx.x; i < params.positions; i += kThreads) {
    const int column = i < params.modulus ? i : i < params.wrapped ? i - params.modulus : params.in;
    uint16_t values[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      values[t] =
          t < present && column < params.in ? __ldg(from + t * params.x_stride + column) : 0;
    }
    Vector<T, kTokens> vector;
    if constexpr (kTokens == 1) {
      vector.words[0] = values[0];
    } else {
#pragma unroll
      for (int w = 0; w < kTokens / 2; ++w)
        vector.words[w] = values[2 * w] | uint32_t{values[2 * w + 1]} << 16;
    }
    x[i] = vector;
  }
}

// x of kTokens tokens from `token` on, transposed; zeros beyond `in` and beyond the last token.
template <typename T, int kTokens>
__device__ __forceinline__ void FillX(const Params<T>& params, int64_t token,
                                      Vector<T, kTokens>* x) {
  if constexpr (sizeof(T) == 2) {
    FillPairs<T, kTokens>(params, token, x);
  } else {
    const float* from = params.x + token * params.x_stride;
#pragma unroll 2
    for (int i = threadIdx.x; i < params.positions; i += kThreads) {
      const int column = i < params.modulus   ? i
                         : i < params.wrapped ? i - params.modulus
                                              : params.in;
      Vector<T, kTokens> vector;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const bool is_there = token + t < params.to.tokens && column < params.in;
        vector.words[t] =
            is_there ? __float_as_uint(__ldg(from + t * params.x_stride + column)) : 0;
      }
      x[i] = vector;
    }
  }
}

// Up to kBatch units of a tile, every `stride`-th from `first` on; what lies at or beyond `end` counts nothing.
struct Batch {
  uint4 units[kBatch];
  uint2 starts[kBatch];
};

template <typename T, Format kFormat>
__device__ __forceinline__ void Load(const Params<T>& params, int first, int stride, int end,
                                     Batch& batch) {
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
      batch.starts[i] = unit < end ? __ldg(params.starts + unit) : make_uint2(zeros, zeros);
    } else if constexpr (kIsF32Csr) {
      batch.starts[i] = unit < end ? __ldg(reinterpret_cast<const uint2*>(from + 512) + lane)
                                   : make_uint2(zeros, zeros);
    }
  }
}

// Sums of a lane: [row of the lane][token].
template <typename T, Format kFormat, int kTokens>
using Sums = float[LaneRows<T>(kFormat)][kTokens];

template <typename T, Format kFormat, int kTokens>
__device__ __forceinline__ void Multiply(const Batch& batch, const Vector<T, kTokens>* x,
                                         Sums<T, kFormat, kTokens>& sums) {
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

template <typename T>
__device__ __forceinline__ void Store(const LinearOutput<T>& to, int64_t token, int64_t row,
                                      float value) {
  if (token >= to.tokens || row >= to.out) return;
  float one[1] = {value + BiasAt(to.bias, row, to.out)};
  Activate<T>(one, to.activation);
  to.y[token * to.y_stride + row] = FromFloat<T>(one[0]);
}

template <typename T, Format kFormat, int kTokens>
__device__ __forceinline__ void RunWhole(const Params<T>& params, Vector<T, kTokens>* x) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int item = blockIdx.x; item < params.groups * params.parts; item += gridDim.x) {
    const int64_t token = int64_t{item / params.parts} * kTokens;
    __syncthreads();  // everybody has left the tokens before
    FillX<T, kTokens>(params, token, x);
    __syncthreads();
    for (int tile = item % params.parts * kWarps + warp; tile < params.tile_count;
         tile += params.parts * kWarps) {
      const int begin = params.tiles[tile], end = params.tiles[tile + 1];
      Sums<T, kFormat, kTokens> sums = {};
      Batch batch, next;
      Load<T, kFormat>(params, begin, 1, end, batch);
      for (int unit = begin; unit < end; unit += kBatch) {
        Load<T, kFormat>(params, unit + kBatch, 1, end, next);
        Multiply<T, kFormat, kTokens>(batch, x, sums);
        batch = next;
      }
#pragma unroll
      for (int r = 0; r < LaneRows<T>(kFormat); ++r) {
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          Store(params.to, token + t, int64_t{tile} * TileRows<T>(kFormat) + r * 32 + lane,
                sums[r][t]);
        }
      }
    }
  }
}

// Shared memory after x: the warps' sums of one tile, and the thread blocks' sums of the tiles that this one finishes.
template <typename T, Format kFormat, int kTokens>
struct StreamSums {
  static constexpr int kCount =
      TileRows<T>(kFormat) * kTokens;  // sum i: row i / kTokens, token i % kTokens
  float warps[kWarps][kCount];
  float parts[2][4][kCount];  // [round % 2][thread block]
};

template <typename T, Format kFormat, int kCluster, int kTokens>
__device__ __forceinline__ void RunStream(const Params<T>& params, Vector<T, kTokens>* x,
                                          StreamSums<T, kFormat, kTokens>* shared) {
  using Shared = StreamSums<T, kFormat, kTokens>;
  constexpr int kStride = kCluster * kWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = static_cast<int>(ClusterRank()), first_unit = rank * kWarps + warp;
  const int item = blockIdx.x / kCluster;  // one a cluster
  const int64_t token = int64_t{item / params.parts} * kTokens;
  const int first_tile = item % params.parts;

  Batch batch, next;
  int begin = 0, end = 0;
  if (first_tile < params.tile_count) {
    begin = params.tiles[first_tile];
    end = params.tiles[first_tile + 1];
  }
  Load<T, kFormat>(params, begin + first_unit, kStride, end, batch);
  MeetCluster();  // every thread block of the cluster is there before the first sums are passed
  WaitForPredecessors();
  FillX<T, kTokens>(params, token, x);
  __syncthreads();

  const int tiles = (params.tile_count - first_tile + params.parts - 1) / params.parts;
  for (int i = 0; i < tiles; ++i) {
    const int tile = first_tile + i * params.parts;
    const bool has_next = i + 1 < tiles;
    const int next_begin = has_next ? params.tiles[tile + params.parts] : 0;
    const int next_end = has_next ? params.tiles[tile + params.parts + 1] : 0;
    Sums<T, kFormat, kTokens> sums = {};
    for (int unit = begin; unit < end; unit += kBatch * kStride) {
      if (unit + kBatch * kStride < end) {
        Load<T, kFormat>(params, unit + kBatch * kStride + first_unit, kStride, end, next);
      } else {
        Load<T, kFormat>(params, next_begin + first_unit, kStride, next_end, next);
      }
      Multiply<T, kFormat, kTokens>(batch, x, sums);
      batch = next;
    }
    if (begin == end) Load<T, kFormat>(params, next_begin + first_unit, kStride, next_end, batch);
    begin = next_begin;
    end = next_end;
#pragma unroll
    for (int r = 0; r < LaneRows<T>(kFormat); ++r) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t)
        shared->warps[warp][(r * 32 + lane) * kTokens + t] = sums[r][t];
    }
    __syncthreads();
    const uint32_t part =
        ClusterAddress(SharedAddress(shared->parts[i / kCluster % 2][rank]), i % kCluster);
    for (int s = threadIdx.x; s < Shared::kCount; s += kThreads) {
      float value = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) value += shared->warps[w][s];
      StoreToCluster(part + 4 * s, value);
    }
    __syncthreads();  // the warps' sums are read
    if (i % kCluster != kCluster - 1 && has_next) continue;
    SyncCluster();  // a round of a tile a thread block: each finishes one
    const int mine = i / kCluster * kCluster + rank;
    if (mine > i) continue;
    for (int s = threadIdx.x; s < Shared::kCount; s += kThreads) {
      float value = 0.0f;
#pragma unroll
      for (int r = 0; r < kCluster; ++r) value += shared->parts[i / kCluster % 2][r][s];
      const int64_t row =
          int64_t{first_tile + mine * params.parts} * TileRows<T>(kFormat) + s / kTokens;
      Store(params.to, token + s % kTokens, row, value);
    }
  }
}

template <typename T, Format kFormat, Share kShare, int kTokens>
__global__ void __launch_bounds__(kThreads, 1) GatherKernel(const Params<T> params) {
  extern __shared__ __align__(16) char dynamic_shared[];
  auto* x = reinterpret_cast<Vector<T, kTokens>*>(dynamic_shared);
  ReleaseSuccessors();
  if constexpr (kShare == Share::kWhole) {
    WaitForPredecessors();
    RunWhole<T, kFormat, kTokens>(params, x);
  } else {
    const size_t x_bytes = (params.positions * sizeof(Vector<T, kTokens>) + 15) / 16 * 16;
    RunStream<T, kFormat, ClusterOf(kShare), kTokens>(
        params, x, reinterpret_cast<StreamSums<T, kFormat, kTokens>*>(dynamic_shared + x_bytes));
    SyncCluster();  // no thread block leaves while another may still pass sums to it
  }
}

template <typename T, Format kFormat, Share kShare, int kTokens>
size_t SharedBytes(int64_t positions) {
  const size_t x = (positions * sizeof(Vector<T, kTokens>) + 15) / 16 * 16;
  return kShare == Share::kWhole ? x : x + sizeof(StreamSums<T, kFormat, kTokens>);
}

template <typename T, Format kFormat, Share kShare, int kTokens>
KernelStatus RunTokens(const KernelContext& ctx, const LinearArgs& args, const GatherImage& image) {
  const char* base = static_cast<const char*>(args.weight.packed);
  const int64_t groups = (args.tokens + kTokens - 1) / kTokens;
  const auto kernel = GatherKernel<T, kFormat, kShare, kTokens>;
  const size_t shared_bytes = SharedBytes<T, kFormat, kShare, kTokens>(image.positions);
  constexpr int kCluster = ClusterOf(kShare);
  int workers = MultiprocessorCount();
  if (kCluster > 1) {
    const KernelStatus status = ActiveClusters(reinterpret_cast<const void*>(kernel), kCluster,
                                               kThreads, kSharedLimit - 1024, &workers);
    if (!status.ok()) return status;
  }
  const int64_t tile_units =
      kShare == Share::kWhole ? (image.tiles + kWarps - 1) / kWarps : image.tiles;
  int64_t parts = workers / groups;
  parts = parts < 1 ? 1 : parts < tile_units ? parts : tile_units;
  const int64_t items = groups * parts;
  const int64_t grid = kCluster > 1 ? items * kCluster : items < workers ? items : workers;
  if (items > INT32_MAX / kCluster)
    return {KernelCode::kUnsupported, "gather: too many token groups for one grid"};
  const Params<T> params{reinterpret_cast<const int32_t*>(base),
                         reinterpret_cast<const uint2*>(base + image.starts_offset),
                         base + image.units_offset,
                         static_cast<const T*>(args.x),
                         args.x_stride,
                         static_cast<int32_t>(args.weight.in),
                         static_cast<int32_t>(image.modulus),
                         static_cast<int32_t>(image.wrapped),
                         static_cast<int32_t>(image.positions),
                         static_cast<int32_t>(image.tiles),
                         static_cast<int32_t>(groups),
                         static_cast<int32_t>(parts),
                         OutputOf<T>(args)};
  return Launch(ctx, {dim3(static_cast<unsigned>(grid)), kThreads, shared_bytes, kCluster, true},
                kernel, params);
}

// As many tokens at a time as there are and as fit.
template <typename T, Format kFormat, Share kShare>
KernelStatus RunShared(const KernelContext& ctx, const LinearArgs& args) {
  const GatherImage image = GatherImageOf(args.weight);
  const auto fits = [&](size_t bytes) { return bytes <= kSharedLimit - 1024; };
  if (args.tokens > 4 && fits(SharedBytes<T, kFormat, kShare, 8>(image.positions))) {
    return RunTokens<T, kFormat, kShare, 8>(ctx, args, image);
  }
  if (args.tokens > 2 && fits(SharedBytes<T, kFormat, kShare, 4>(image.positions))) {
    return RunTokens<T, kFormat, kShare, 4>(ctx, args, image);
  }
  if (args.tokens > 1 && fits(SharedBytes<T, kFormat, kShare, 2>(image.positions))) {
    return RunTokens<T, kFormat, kShare, 2>(ctx, args, image);
  }
  return RunTokens<T, kFormat, kShare, 1>(ctx, args, image);
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
