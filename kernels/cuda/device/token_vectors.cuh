// token_vectors.cuh — x of a few tokens in shared memory, transposed: the values of all tokens of a position side by side.
#pragma once

#include <type_traits>

#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/ptx.cuh"

namespace espalier::kernels::cuda {

constexpr int kScatteredWarps = 16;
constexpr int kScatteredThreads = 32 * kScatteredWarps;

template <typename T>
struct ScatteredParams {
  const int32_t* tiles;
  const char* starts;
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

// Columns [first, first + 32) of eight tokens of 2-byte values for a warp: lane (g, q) loads eight columns of token g, and
// stmatrix turns 8×8 matrices on their way. Matrix j takes the column pair (j + q) mod 4 of lane (g, q), not pair j, so that
// the rows it stores lie in different banks.
template <typename T>
__device__ __forceinline__ uint4 LoadOctet(const ScatteredParams<T>& params, int64_t token,
                                           int first) {
  const int lane = threadIdx.x % 32;
  if (token + lane / 4 >= params.to.tokens) return uint4{};
  const T* from = params.x + (token + lane / 4) * params.x_stride + first + lane % 4 * 8;
  return __ldg(reinterpret_cast<const uint4*>(from));
}
__device__ __forceinline__ void StoreOctet(const uint4& columns, uint32_t x_address, int first) {
  const int lane = threadIdx.x % 32, q = lane % 4;
  const bool by_one = q % 2 != 0, by_two = q >= 2;
  const uint32_t once[4] = {by_one ? columns.y : columns.x, by_one ? columns.z : columns.y,
                            by_one ? columns.w : columns.z, by_one ? columns.x : columns.w};
  const uint32_t pairs[4] = {by_two ? once[2] : once[0], by_two ? once[3] : once[1],
                             by_two ? once[0] : once[2], by_two ? once[1] : once[3]};
  // Lane 8j + i addresses column i of matrix j: pair (j + i / 2) mod 4 of the columns of q = i / 2.
  const int j = lane / 8, i = lane % 8;
  const int column = first + i / 2 * 8 + (j + i / 2) % 4 * 2 + i % 2;
  StoreMatricesTransposed(x_address + column * 16, pairs);
}

// Positions from `whole` on, one at a time: what is left of x, its beginning again, zeros.
template <typename T, int kTokens>
__device__ __forceinline__ void FillRest(const ScatteredParams<T>& params, int64_t token, int whole,
                                         Vector<T, kTokens>* x) {
  const uint16_t* from = reinterpret_cast<const uint16_t*>(params.x) + token * params.x_stride;
  const int present = static_cast<int>(min(int64_t{kTokens}, params.to.tokens - token));
  for (int i = whole + threadIdx.x; i < params.positions; i += kScatteredThreads) {
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

// FillX for 2-byte values.
template <typename T, int kTokens>
__device__ __forceinline__ void FillPairs(const ScatteredParams<T>& params, int64_t token,
                                          Vector<T, kTokens>* x) {
  constexpr int kColumns = FillColumns(kTokens);
  const uint16_t* from = reinterpret_cast<const uint16_t*>(params.x) + token * params.x_stride;
  const int present = static_cast<int>(min(int64_t{kTokens}, params.to.tokens - token));
  const int whole = min(params.in, params.modulus) / kColumns * kColumns;
#pragma unroll 2
  for (int first = threadIdx.x * kColumns; first < whole; first += kScatteredThreads * kColumns) {
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
  FillRest<T, kTokens>(params, token, whole, x);
}

// x of kTokens tokens from `token` on, transposed; zeros beyond `in` and beyond the last token.
template <typename T, int kTokens>
__device__ __forceinline__ void FillX(const ScatteredParams<T>& params, int64_t token,
                                      Vector<T, kTokens>* x) {
  if constexpr (sizeof(T) == 2 && kTokens == 8) {
    constexpr int kAtOnce = 4, kStep = 32 * kScatteredWarps;
    const int blocks = min(params.in, params.modulus) / 32 * 32;
    for (int first = threadIdx.x / 32 * 32; first < blocks; first += kAtOnce * kStep) {
      uint4 columns[kAtOnce];
#pragma unroll
      for (int b = 0; b < kAtOnce; ++b) {
        columns[b] =
            first + b * kStep < blocks ? LoadOctet(params, token, first + b * kStep) : uint4{};
      }
#pragma unroll
      for (int b = 0; b < kAtOnce; ++b) {
        if (first + b * kStep < blocks) StoreOctet(columns[b], SharedAddress(x), first + b * kStep);
      }
    }
    FillRest<T, kTokens>(params, token, blocks, x);
  } else if constexpr (sizeof(T) == 2) {
    FillPairs<T, kTokens>(params, token, x);
  } else {
    const float* from = params.x + token * params.x_stride;
#pragma unroll 2
    for (int i = threadIdx.x; i < params.positions; i += kScatteredThreads) {
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

}  // namespace espalier::kernels::cuda
