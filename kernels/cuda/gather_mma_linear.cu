// gather_mma_linear.cu — csr and diagonal(1) on sparse tensor cores, one value of x a product.
//
// The instruction's weights are two permutations (gather_mma_image.h), so that 16 rows take x from 16 positions each of
// its own: a sixteenth of what the tensor cores do counts, which is still twice what CUDA cores reach once they have
// unpacked 2-byte values. What bounds it is shared memory: 2 bytes a product, 64 products a clock and multiprocessor.
//
// Few tokens are shared among thread blocks as gather_linear.cu does. For many, a warp takes whole tiles of 64 rows, and
// x of 8 or 16 tokens (PLANES of 8) stays in shared memory: each word of weights then serves 8 or 16 tokens. The next
// weights are always on their way, across tiles and across groups of tokens.
#include <algorithm>

#include "kernels/cuda/device/scattered.cuh"
#include "kernels/cuda/gather_mma_image.h"
#include "kernels/cuda/kernels.h"

namespace espalier::kernels::cuda {
namespace {

// What a lane needs to know of the permutations. Weight k = j of row j is in group j / 4 of four neighbours, of which the
// metadata names either the first two or the last two: it is the first or the second of these as j is even or odd.
struct Permutations {
  uint32_t
      select[2]
            [4];  // [parity of the product]: what of its word each of a lane's four registers takes
  uint32_t metadata;

  __device__ __forceinline__ Permutations() {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    constexpr uint32_t kNothing = 0x4444;
    const uint32_t low = g % 2 == 0 ? 0x4410 : 0x1044, high = g % 2 == 0 ? 0x4432 : 0x3244;
#pragma unroll
    for (int parity = 0; parity < 2; ++parity) {
      const bool has = (q ^ g / 4) % 2 == parity;
      select[parity][0] = has && q < 2 ? low : kNothing;
      select[parity][1] = has && q >= 2 ? low : kNothing;
      select[parity][2] = has && q < 2 ? high : kNothing;
      select[parity][3] = has && q >= 2 ? high : kNothing;
    }
    metadata = g % 4 < 2 ? 0x44444444 : 0xeeeeeeee;
  }
};

// The products of one unit. `Unit` says how many there are and for product i: its parity, which of the lane's words has
// its weights, where this lane fetches x for it, and which sums it adds to. Four fetches are on their way while the
// products of the four before are made. (Into the next unit too was slower by 10 to 20 %.)
template <typename T, typename Unit, int kPlanes>
__device__ __forceinline__ void MultiplyUnit(const Unit& unit, const Permutations& permutations,
                                             uint32_t plane_bytes,
                                             float (&sums)[kPlanes][Unit::kSums][4]) {
  constexpr int kAtOnce = 4 / kPlanes, kSteps = Unit::kProducts / kAtOnce;
  uint32_t x[2][kAtOnce][kPlanes][4];
  const auto fetch = [&](int step) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t address = unit.XAddress(step * kAtOnce + i);
#pragma unroll
      for (int p = 0; p < kPlanes; ++p)
        LoadMatricesTransposed(x[step % 2][i][p], address + p * plane_bytes);
    }
  };
  fetch(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) fetch(step + 1);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int product = step * kAtOnce + i;
      uint32_t weights[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        weights[r] =
            __byte_perm(unit.Word(product), 0, permutations.select[Unit::ParityOf(product)][r]);
      }
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
        MmaSparse<T>(sums[p][Unit::SumsOf(product)], weights, x[step % 2][i][p],
                     permutations.metadata);
      }
    }
  }
}

// A unit of four diagonals and 64 rows: sums [u] are those of rows 16u … 16u + 15.
struct DiagonalUnit {
  static constexpr int kUnits = 2;  // on their way
  static constexpr int kLists = 1, kProducts = 8, kSums = 4;
  uint4 words;
  uint32_t starts;        // of this lane's half: of the even products, of the odd ones
  uint32_t addresses[2];  // once prepared

  template <typename T>
  __device__ __forceinline__ void Load(const ScatteredParams<T>& params, int unit) {
    const int lane = threadIdx.x % 32;
    words = __ldg(reinterpret_cast<const uint4*>(params.units + int64_t{unit} * kUnitBytes) + lane);
    starts = __ldg(reinterpret_cast<const uint32_t*>(params.starts) + unit * 2 + lane / 16);
  }
  __device__ __forceinline__ void Clear(int zeros) {
    words = uint4{};
    starts = static_cast<uint32_t>(zeros) * 0x10001;
  }
  __device__ __forceinline__ void Prepare(uint32_t x) {
    const uint32_t lane = threadIdx.x % 16;
    addresses[0] = x + 16 * lane + (starts & 0xffff) * 16;
    addresses[1] = x + 16 * (lane ^ 4) + (starts >> 16) * 16;
  }

  // Products 0 to 3 are the even ones of the four groups of rows.
  __device__ __forceinline__ static constexpr int ParityOf(int product) { return product / 4; }
  __device__ __forceinline__ static constexpr int SumsOf(int product) { return product % 4; }
  __device__ __forceinline__ uint32_t Word(int product) const {
    const int u = product % 4;
    return u == 0 ? words.x : u == 1 ? words.y : u == 2 ? words.z : words.w;
  }
  __device__ __forceinline__ uint32_t XAddress(int product) const {
    return addresses[product / 4] + 16 * kMmaGroupRows * (product % 4);
  }
};

// A unit of eight non-zeros of 16 rows. Even and odd products have sums of their own: a product need not wait for the one
// before.
struct CsrUnit {
  static constexpr int kUnits = 4;
  static constexpr int kLists = kMmaWindowRows / kMmaGroupRows, kProducts = 4, kSums = 2;
  uint2 words;      // of products 0 and 2 or 1 and 3
  uint2 positions;  // of all four
  uint32_t x;

  template <typename T>
  __device__ __forceinline__ void Load(const ScatteredParams<T>& params, int unit) {
    const auto* from = reinterpret_cast<const uint2*>(params.units + int64_t{unit} * kUnitBytes) +
                       threadIdx.x % 32;
    words = __ldg(from);
    positions = __ldg(from + 32);
  }
  __device__ __forceinline__ void Clear(int zeros) {
    const uint32_t position = static_cast<uint32_t>(zeros + threadIdx.x % 8) * 0x10001;
    words = uint2{};
    positions = make_uint2(position, position);
  }
  __device__ __forceinline__ void Prepare(uint32_t x_address) { x = x_address; }

  __device__ __forceinline__ static constexpr int ParityOf(int product) { return product % 2; }
  __device__ __forceinline__ static constexpr int SumsOf(int product) { return product % 2; }
  __device__ __forceinline__ uint32_t Word(int product) const {
    return product / 2 == 0 ? words.x : words.y;
  }
  __device__ __forceinline__ uint32_t XAddress(int product) const {
    const uint32_t pair = product / 2 == 0 ? positions.x : positions.y;
    return x + (product % 2 == 0 ? pair & 0xffff : pair >> 16) * 16;
  }
};

// --- few tokens: the frame of scattered.cuh ---

// visit(row of 16, token, sum).
template <typename Visitor>
__device__ __forceinline__ void VisitSums(const float (&sums)[4], Visitor visit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) visit(i / 2 * 8 + lane / 4, lane % 4 * 2 + i % 2, sums[i]);
}

template <typename T, typename Unit>
struct SharedForm {
  static constexpr bool kIsCsr = Unit::kLists > 1;
  static constexpr int kTokens = kMmaTokens, kTileRows = kIsCsr ? kMmaGroupRows : kDiagonalTileRows;
  static constexpr int kBatch = Unit::kUnits;
  struct Batch {
    Unit units[kBatch];
  };
  using Sums = float[1][Unit::kSums][4];

  __device__ __forceinline__ static int64_t RowOf(const ScatteredParams<T>& params, int tile,
                                                  int row) {
    return kIsCsr ? __ldg(reinterpret_cast<const int32_t*>(params.starts) + tile * kTileRows + row)
                  : int64_t{tile} * kTileRows + row;
  }
  __device__ __forceinline__ static void Load(const ScatteredParams<T>& params, int first,
                                              int stride, int end, Batch& batch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int unit = first + i * stride;
      if (unit < end) {
        batch.units[i].Load(params, unit);
      } else {
        batch.units[i].Clear(params.wrapped);
      }
    }
  }
  __device__ __forceinline__ static void Multiply(Batch& batch, const Vector<T, kTokens>* x,
                                                  Sums& sums) {
    const Permutations permutations;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      batch.units[i].Prepare(SharedAddress(x));
      MultiplyUnit<T, Unit, 1>(batch.units[i], permutations, 0, sums);
    }
  }
  template <typename Visitor>
  __device__ __forceinline__ static void Visit(const Sums& sums, Visitor visit) {
    if constexpr (kIsCsr) {
      const float both[4] = {sums[0][0][0] + sums[0][1][0], sums[0][0][1] + sums[0][1][1],
                             sums[0][0][2] + sums[0][1][2], sums[0][0][3] + sums[0][1][3]};
      VisitSums(both, visit);
    } else {
#pragma unroll
      for (int u = 0; u < Unit::kSums; ++u) {
        VisitSums(sums[0][u],
                  [&](int row, int t, float sum) { visit(u * kMmaGroupRows + row, t, sum); });
      }
    }
  }
};

static_assert(kMostMmaStreamPositions * 16 +
                  sizeof(StreamSums<SharedForm<BFloat16, DiagonalUnit>, 4>) <=
              kScatteredShared);

// --- many tokens ---

constexpr int kStagingRow = 128;                         // bytes: 64 rows of a tile, of one token
constexpr int kStagingPlane = kMmaTokens * kStagingRow;  // a warp's

template <int kPlanes>
constexpr int64_t WholeShared(int64_t positions) {
  return kPlanes * (positions * 16 + int64_t{kScatteredWarps} * kStagingPlane);
}
static_assert(WholeShared<1>(kMostMmaPositions) <= kScatteredShared);

// Byte of 8 rows' chunk of a token in a staged plane; neighbouring tokens' lie in different banks.
__device__ __forceinline__ uint32_t StagedChunk(int token, int chunk) {
  return token * kStagingRow + ((chunk ^ token) % 8) * 16;
}

// Bias, residual and activation of the sums of 16 · kCount rows, in place; rows [u][h] are those of sums [u][2h] and
// [u][2h + 1], whose tokens are 2q and 2q + 1 of every plane; `token` is the first of all.
template <typename T, int kPlanes, int kCount>
__device__ __forceinline__ void Finish(float (&sums)[kPlanes][kCount][4], const LinearOutput<T>& to,
                                       int64_t token, const int (&rows)[kCount][2]) {
  if (to.bias != nullptr) {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float bias = rows[u][h] < to.out ? __ldg(to.bias + rows[u][h]) : 0.0f;
#pragma unroll
        for (int p = 0; p < kPlanes; ++p) sums[p][u][2 * h] += bias, sums[p][u][2 * h + 1] += bias;
      }
    }
  }
  if (to.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kPlanes * kCount * 4; ++i) {
      const int p = i / (4 * kCount), u = i / 4 % kCount, row = rows[u][i / 2 % 2];
      const int64_t at = token + p * kMmaTokens + threadIdx.x % 4 * 2 + i % 2;
      if (row < to.out && at < to.tokens) sums[p][u][i % 4] += ResidualAt(to, at, row);
    }
  }
  Activate<T>(reinterpret_cast<float(&)[kPlanes * kCount * 4]>(sums), to.activation);
}

// A list's sums to the warp's staging area.
template <typename T, typename Unit, int kPlanes>
__device__ __forceinline__ void StageList(const ScatteredParams<T>& params, int64_t token, int tile,
                                          int list, float (&sums)[kPlanes][Unit::kSums][4],
                                          uint32_t staging) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int first = tile * kMmaWindowRows;
  if constexpr (Unit::kLists == 1) {
    int rows[Unit::kSums][2];
#pragma unroll
    for (int u = 0; u < Unit::kSums; ++u)
      rows[u][0] = first + 16 * u + g, rows[u][1] = first + 16 * u + 8 + g;
    Finish<T>(sums, params.to, token, rows);
    // Matrix m of four is rows 8m … of the half; its column i, a token, goes to where lane 8m + i says.
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto& even = sums[p][2 * half];
        const auto& odd = sums[p][2 * half + 1];
        const uint32_t matrices[4] = {PackPair<T>(even[0], even[1]), PackPair<T>(even[2], even[3]),
                                      PackPair<T>(odd[0], odd[1]), PackPair<T>(odd[2], odd[3])};
        StoreMatricesTransposed(
            staging + p * kStagingPlane + StagedChunk(lane % 8, 4 * half + lane / 8), matrices);
      }
    }
  } else {
    const auto* order = reinterpret_cast<const int32_t*>(params.starts) +
                        (tile * Unit::kLists + list) * kMmaGroupRows;
    const int rows[1][2] = {{__ldg(order + g), __ldg(order + g + 8)}};
    float both[kPlanes][1][4];
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
#pragma unroll
      for (int i = 0; i < 4; ++i) both[p][0][i] = sums[p][0][i] + sums[p][1][i];
    }
    Finish<T>(both, params.to, token, rows);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (rows[0][h] >= params.to.out) continue;
      const int row = rows[0][h] - first;
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
        const uint32_t pair = PackPair<T>(both[p][0][2 * h], both[p][0][2 * h + 1]);
        const uint32_t to = staging + p * kStagingPlane + row % 8 * 2;
        StoreShared16(to + StagedChunk(2 * q, row / 8), pair);
        StoreShared16(to + StagedChunk(2 * q + 1, row / 8), pair >> 16);
      }
    }
  }
}

// 64 rows of 8 tokens from the staging area to y: lane (t = lane / 8, chunk = lane % 8) stores eight rows of tokens t and
// t + 4. `row` is where token t's first row of the tile is in y, `tokens` how many there are from t on.
template <typename T>
__device__ __forceinline__ void StoreStagedPlane(T* row, const LinearOutput<T>& to, int tokens,
                                                 int first, uint32_t staging) {
  const int lane = threadIdx.x % 32, chunk = lane % 8, out = static_cast<int>(to.out);
  const int column = first + chunk * 8;
  if (column >= out) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * 4 >= tokens) return;
    const uint4 words = LoadShared128(staging + StagedChunk(half * 4 + lane / 8, chunk));
    T* const at = row + half * 4 * to.y_stride;
    if (column + 8 <= out) {
      *reinterpret_cast<uint4*>(at + column) = words;
    } else {
      StoreQuad(at, column, out, words.x, words.y);
      if (column + 4 < out) StoreQuad(at, column + 4, out, words.z, words.w);
    }
  }
}

// Brings x of the tokens from `token` on to L2.
template <typename T, int kTokens>
__device__ __forceinline__ void PrefetchX(const ScatteredParams<T>& params, int64_t token) {
  constexpr int kLine = 128 / sizeof(T);
  const int lines = (params.in + kLine - 1) / kLine;
  for (int i = threadIdx.x; i < lines * kTokens; i += kScatteredThreads) {
    const int64_t t = token + i / lines;
    if (t < params.to.tokens) {
      asm volatile(
          "prefetch.global.L2 [%0];" ::"l"(params.x + t * params.x_stride + i % lines * kLine));
    }
  }
}

template <typename T, typename Unit, int kPlanes>
__global__ void __launch_bounds__(kScatteredThreads, 1)
    GatherMmaKernel(const ScatteredParams<T> params) {
  constexpr int kUnits = Unit::kUnits, kLists = Unit::kLists;
  extern __shared__ __align__(16) char dynamic_shared[];
  const uint32_t plane_bytes = params.positions * 16;
  const uint32_t x = SharedAddress(dynamic_shared);
  const int warp = threadIdx.x / 32;
  const uint32_t staging = x + kPlanes * (plane_bytes + warp * kStagingPlane);
  const Permutations permutations;
  const int items = params.groups * params.parts, step = params.parts * kScatteredWarps;
  const int tile_count = params.tile_count / kLists;  // of 64 rows
  const auto first_tile = [&](int item) { return item % params.parts + params.parts * warp; };
  const auto units_of = [&](int tile, int list) {
    const int32_t* at = params.tiles + tile * kLists + list;
    return tile < tile_count ? make_int2(__ldg(at), __ldg(at + 1)) : make_int2(0, 0);
  };
  const auto load = [&](Unit(&units)[kUnits], int first, int end) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (first + i < end) units[i].Load(params, first + i);
    }
  };

  ReleaseSuccessors();
  int2 now = units_of(first_tile(blockIdx.x), 0);
  Unit units[kUnits], next_units[kUnits];
  load(units, now.x, now.y);
  WaitForPredecessors();
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t token = int64_t{item / params.parts} * kPlanes * kMmaTokens;
    __syncthreads();  // everybody has left the tokens before
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      FillX<T, kMmaTokens>(
          params, token + p * kMmaTokens,
          reinterpret_cast<Vector<T, kMmaTokens>*>(dynamic_shared + p * plane_bytes));
    }
    __syncthreads();
    if (item + gridDim.x < items) {
      PrefetchX<T, kPlanes * kMmaTokens>(
          params,
          int64_t{(item + static_cast<int>(gridDim.x)) / params.parts} * kPlanes * kMmaTokens);
    }
    const int64_t lane_token = token + threadIdx.x % 32 / 8;
    T* const row = params.to.y + lane_token * params.to.y_stride;
    const int tokens = static_cast<int>(params.to.tokens - lane_token);
    for (int tile = first_tile(item); tile < tile_count; tile += step) {
#pragma unroll 1
      for (int list = 0; list < kLists; ++list) {
        int next_tile = list + 1 < kLists ? tile : tile + step;
        if (next_tile >= tile_count && item + gridDim.x < items)
          next_tile = first_tile(item + gridDim.x);
        const int2 next = units_of(next_tile, list + 1 < kLists ? list + 1 : 0);
        float sums[kPlanes][Unit::kSums][4] = {};
        for (int unit = now.x; unit < now.y; unit += kUnits) {
          const bool is_last = unit + kUnits >= now.y;
          load(next_units, is_last ? next.x : unit + kUnits, is_last ? next.y : now.y);
#pragma unroll
          for (int i = 0; i < kUnits; ++i) {
            if (i > 0 && unit + i >= now.y) break;
            units[i].Prepare(x);
            MultiplyUnit<T, Unit, kPlanes>(units[i], permutations, plane_bytes, sums);
          }
#pragma unroll
          for (int i = 0; i < kUnits; ++i) units[i] = next_units[i];
        }
        if (now.x == now.y) load(units, next.x, next.y);
        now = next;
        StageList<T, Unit>(params, token, tile, list, sums, staging);
      }
      __syncwarp();
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
        StoreStagedPlane(row + p * kMmaTokens * params.to.y_stride, params.to,
                         tokens - p * kMmaTokens, tile * kMmaWindowRows,
                         staging + p * kStagingPlane);
      }
      __syncwarp();
    }
  }
}

template <typename T, typename Unit, int kPlanes>
KernelStatus LaunchWhole(const KernelContext& ctx, ScatteredParams<T> params) {
  const int64_t groups = (params.to.tokens + kPlanes * kMmaTokens - 1) / (kPlanes * kMmaTokens);
  const int64_t workers = MultiprocessorCount(), tiles = params.tile_count / Unit::kLists;
  const int64_t parts = std::clamp<int64_t>(workers / groups, 1, std::max<int64_t>(tiles, 1));
  params.groups = static_cast<int32_t>(groups);
  params.parts = static_cast<int32_t>(parts);
  const auto grid = static_cast<unsigned>(std::min(groups * parts, workers));
  return Launch(ctx,
                {dim3(grid), kScatteredThreads,
                 static_cast<size_t>(WholeShared<kPlanes>(params.positions)), 1, true},
                GatherMmaKernel<T, Unit, kPlanes>, params);
}

// Sixteen tokens at a time where they fit and where that leaves work for every multiprocessor. With few tokens windows of
// csr are too much for one warp.
template <typename T, typename Unit, Share kShare>
KernelStatus RunUnits(const KernelContext& ctx, const ScatteredParams<T>& params) {
  if constexpr (kShare != Share::kWhole) {
    return RunScattered<T, SharedForm<T, Unit>, kShare>(ctx, params);
  } else if (params.to.tokens <= 64) {
    return RunScattered<T, SharedForm<T, Unit>, kShare>(ctx, params);
  } else if (WholeShared<2>(params.positions) <= static_cast<int64_t>(kScatteredShared) &&
             params.to.tokens >= 512) {
    return LaunchWhole<T, Unit, 2>(ctx, params);
  } else {
    return LaunchWhole<T, Unit, 1>(ctx, params);
  }
}

template <typename T, Share kShare>
KernelStatus RunTyped(const KernelContext& ctx, const LinearArgs& args) {
  const auto params = ScatteredParamsOf<T>(args, GatherMmaImageOf(args.weight));
  return args.weight.layout == Layout::kCsr ? RunUnits<T, CsrUnit, kShare>(ctx, params)
                                            : RunUnits<T, DiagonalUnit, kShare>(ctx, params);
}

template <Share kShare>
KernelStatus Run(const KernelContext& ctx, const LinearArgs& args) {
  if (!FitsGatherMmaImage(DescOfArgs(args), kShare != Share::kWhole)) {
    return {KernelCode::kUnsupported,
            "gather mma: needs csr or diagonal(1) of 2-byte values, at most 13,312 columns"};
  }
  if (KernelStatus status = CheckArgs(args); !status.ok() || args.tokens == 0) return status;
  return args.io_dtype == DType::kBFloat16 ? RunTyped<BFloat16, kShare>(ctx, args)
                                           : RunTyped<Float16, kShare>(ctx, args);
}

}  // namespace

KernelStatus RunGatherMmaStream(const KernelContext& ctx, const LinearArgs& args) {
  return Run<Share::kStream4>(ctx, args);
}

KernelStatus RunGatherMmaPairs(const KernelContext& ctx, const LinearArgs& args) {
  return Run<Share::kStream2>(ctx, args);
}

KernelStatus RunGatherMmaWhole(const KernelContext& ctx, const LinearArgs& args) {
  return Run<Share::kWhole>(ctx, args);
}

}  // namespace espalier::kernels::cuda
