// scattered.cuh — the frame of the kernels that keep x of a few tokens in shared memory and stream scattered weights past it.
//
// A tile of rows is a list of units (gather_image.h); what a unit is and how a warp multiplies it is a FORM:
//   kTokens, kTileRows     tokens at a time, rows of a tile
//   RowOf                  which row of y a tile's row is
//   Batch, Load, Multiply  a few units in registers, asked for ahead of their use; sums += units · x
//   Sums, Visit            a lane's sums; visit(row of the tile, token, sum) for each
// Position i of x (gather_image.h) is kept as the values of kTokens tokens side by side. Two ways to share the work:
//   kStream  few tokens: a cluster of four (kStream4) or two (kStream2) thread blocks takes a tile, each of its warps every
//            64th or 32nd unit of it; the sums meet in the shared memory of one of the thread blocks. The first weights are
//            asked for before the wait on the previous kernel.
//   kWhole   any number of tokens: a warp takes whole tiles, a thread block one group of kTokens tokens at a time.
#pragma once

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/token_vectors.cuh"
#include "kernels/cuda/gather_image.h"

namespace espalier::kernels::cuda {

enum class Share { kStream4, kStream2, kWhole };

constexpr size_t kScatteredShared = 226 * 1024;  // the most a thread block takes

constexpr int ClusterOf(Share share) {
  return share == Share::kStream4 ? 4 : share == Share::kStream2 ? 2 : 1;
}

template <typename T>
__device__ __forceinline__ void StoreOne(const LinearOutput<T>& to, int64_t token, int64_t row,
                                         float value) {
  if (token >= to.tokens || row >= to.out) return;
  float one[1] = {value + BiasAt(to.bias, row, to.out) + ResidualAt(to, token, row)};
  Activate<T>(one, to.activation);
  to.y[token * to.y_stride + row] = FromFloat<T>(one[0]);
}

template <typename T, typename Form>
__device__ __forceinline__ void RunWhole(const ScatteredParams<T>& params,
                                         Vector<T, Form::kTokens>* x) {
  constexpr int kTokens = Form::kTokens, kWarps = kScatteredWarps;
  const int warp = threadIdx.x / 32;
  for (int item = blockIdx.x; item < params.groups * params.parts; item += gridDim.x) {
    const int64_t token = int64_t{item / params.parts} * kTokens;
    __syncthreads();  // everybody has left the tokens before
    FillX<T, kTokens>(params, token, x);
    __syncthreads();
    for (int tile = item % params.parts * kWarps + warp; tile < params.tile_count;
         tile += params.parts * kWarps) {
      const int begin = params.tiles[tile], end = params.tiles[tile + 1];
      typename Form::Sums sums = {};
      typename Form::Batch batch, next;
      Form::Load(params, begin, 1, end, batch);
      for (int unit = begin; unit < end; unit += Form::kBatch) {
        Form::Load(params, unit + Form::kBatch, 1, end, next);
        Form::Multiply(batch, x, sums);
        batch = next;
      }
      Form::Visit(sums, [&](int row, int t, float sum) {
        StoreOne(params.to, token + t, Form::RowOf(params, tile, row), sum);
      });
    }
  }
}

// Shared memory after x: the warps' sums of one tile, and the thread blocks' sums of the tiles that this one finishes.
template <typename Form, int kCluster>
struct StreamSums {
  // Sum i: row i / kTokens, token i % kTokens.
  static constexpr int kCount = Form::kTileRows * Form::kTokens;
  float warps[kScatteredWarps][kCount];
  float parts[2][kCluster][kCount];  // [round % 2][thread block]
};

template <typename T, typename Form, int kCluster>
__device__ __forceinline__ void RunStream(const ScatteredParams<T>& params,
                                          Vector<T, Form::kTokens>* x,
                                          StreamSums<Form, kCluster>* shared) {
  using Shared = StreamSums<Form, kCluster>;
  constexpr int kTokens = Form::kTokens, kWarps = kScatteredWarps, kThreads = kScatteredThreads;
  constexpr int kBatch = Form::kBatch, kStride = kCluster * kWarps;
  const int warp = threadIdx.x / 32;
  const int rank = static_cast<int>(ClusterRank()), first_unit = rank * kWarps + warp;
  const int item = blockIdx.x / kCluster;  // one a cluster
  const int64_t token = int64_t{item / params.parts} * kTokens;
  const int first_tile = item % params.parts;

  typename Form::Batch batch, next;
  int begin = 0, end = 0;
  if (first_tile < params.tile_count) {
    begin = params.tiles[first_tile];
    end = params.tiles[first_tile + 1];
  }
  Form::Load(params, begin + first_unit, kStride, end, batch);
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
    typename Form::Sums sums = {};
    for (int unit = begin; unit < end; unit += kBatch * kStride) {
      if (unit + kBatch * kStride < end) {
        Form::Load(params, unit + kBatch * kStride + first_unit, kStride, end, next);
      } else {
        Form::Load(params, next_begin + first_unit, kStride, next_end, next);
      }
      Form::Multiply(batch, x, sums);
      batch = next;
    }
    if (begin == end) Form::Load(params, next_begin + first_unit, kStride, next_end, batch);
    begin = next_begin;
    end = next_end;
    Form::Visit(sums,
                [&](int row, int t, float sum) { shared->warps[warp][row * kTokens + t] = sum; });
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
      const int64_t row = Form::RowOf(params, first_tile + mine * params.parts, s / kTokens);
      StoreOne(params.to, token + s % kTokens, row, value);
    }
  }
}

template <typename T, typename Form, Share kShare>
__global__ void __launch_bounds__(kScatteredThreads, 1)
    GatherKernel(const ScatteredParams<T> params) {
  extern __shared__ __align__(16) char dynamic_shared[];
  auto* x = reinterpret_cast<Vector<T, Form::kTokens>*>(dynamic_shared);
  ReleaseSuccessors();
  if constexpr (kShare == Share::kWhole) {
    WaitForPredecessors();
    RunWhole<T, Form>(params, x);
  } else {
    const size_t x_bytes = (params.positions * sizeof(Vector<T, Form::kTokens>) + 15) / 16 * 16;
    RunStream<T, Form, ClusterOf(kShare)>(
        params, x,
        reinterpret_cast<StreamSums<Form, ClusterOf(kShare)>*>(dynamic_shared + x_bytes));
    SyncCluster();  // no thread block leaves while another may still pass sums to it
  }
}

template <typename T, typename Form, Share kShare>
size_t ScatteredSharedBytes(int64_t positions) {
  const size_t x = (positions * sizeof(Vector<T, Form::kTokens>) + 15) / 16 * 16;
  return kShare == Share::kWhole ? x : x + sizeof(StreamSums<Form, ClusterOf(kShare)>);
}

// What RunScattered needs to know of a problem whose weights are packed as `image`.
template <typename T>
ScatteredParams<T> ScatteredParamsOf(const LinearArgs& args, const GatherImage& image) {
  const char* base = static_cast<const char*>(args.weight.packed);
  return {reinterpret_cast<const int32_t*>(base),
          base + image.starts_offset,
          base + image.units_offset,
          static_cast<const T*>(args.x),
          args.x_stride,
          static_cast<int32_t>(args.weight.in),
          static_cast<int32_t>(image.modulus),
          static_cast<int32_t>(image.wrapped),
          static_cast<int32_t>(image.positions),
          static_cast<int32_t>(image.tiles),
          0,
          0,
          OutputOf<T>(args)};
}

// Launches a form; what it does not know of `params` (groups, parts) is filled in.
template <typename T, typename Form, Share kShare>
KernelStatus RunScattered(const KernelContext& ctx, ScatteredParams<T> params) {
  const int64_t groups = (params.to.tokens + Form::kTokens - 1) / Form::kTokens;
  const auto kernel = GatherKernel<T, Form, kShare>;
  const size_t shared_bytes = ScatteredSharedBytes<T, Form, kShare>(params.positions);
  constexpr int kCluster = ClusterOf(kShare);
  int workers = MultiprocessorCount();
  if (kCluster > 1) {
    const KernelStatus status = ActiveClusters(reinterpret_cast<const void*>(kernel), kCluster,
                                               kScatteredThreads, kScatteredShared, &workers);
    if (!status.ok()) return status;
  }
  const int64_t tile_units = kShare == Share::kWhole
                                 ? (params.tile_count + kScatteredWarps - 1) / kScatteredWarps
                                 : params.tile_count;
  int64_t parts = workers / groups;
  parts = parts < 1 ? 1 : parts < tile_units ? parts : tile_units;
  const int64_t items = groups * parts;
  const int64_t grid = kCluster > 1 ? items * kCluster : items < workers ? items : workers;
  if (items > INT32_MAX / kCluster)
    return {KernelCode::kUnsupported, "gather: too many token groups for one grid"};
  params.groups = static_cast<int32_t>(groups);
  params.parts = static_cast<int32_t>(parts);
  return Launch(
      ctx, {dim3(static_cast<unsigned>(grid)), kScatteredThreads, shared_bytes, kCluster, true},
      kernel, params);
}

}  // namespace espalier::kernels::cuda
