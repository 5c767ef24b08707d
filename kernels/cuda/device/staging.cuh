// staging.cuh — from the accumulators of wgmma with weights as the 64-row operand to the box that a tensor map stores; and
// residuals, which take the same way back.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/ptx.cuh"

namespace espalier::kernels::cuda {

constexpr int kStagedTokens = 64;
constexpr int kStagedRowBytes = 128;  // 64 outputs of a token

// Where this lane writes its part of a warp's 16 outputs × 16 tokens, in its warpgroup's staging area: one 128-byte row a
// token, swizzled like the tensor map.
__device__ __forceinline__ uint32_t StagingOffset() {
  // Lane 8m + i addresses token i of matrix m: matrices 0 and 1 are outputs 0..7 and 8..15 of 8 tokens, 2 and 3 of the
  // next 8.
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int chunk16 = (2 * warp + lane / 8 % 2) ^ (lane % 8);
  return (lane / 16 * 8 + lane % 8) * kStagedRowBytes + chunk16 * 16;
}

// A warp's 16 outputs × kTokens tokens, values[0 .. kTokens / 2), as wgmma leaves them: the product came out transposed;
// stmatrix turns it. `to` is the staging area plus StagingOffset().
template <typename T, int kTokens>
__device__ __forceinline__ void StoreStaged(const float (&values)[kTokens / 2], uint32_t to) {
  static_assert(kTokens % 16 == 0);
#pragma unroll
  for (int j = 0; j < kTokens / 8; j += 2) {
    const uint32_t matrices[4] = {PackPair<T>(values[4 * j], values[4 * j + 1]),
                                  PackPair<T>(values[4 * j + 2], values[4 * j + 3]),
                                  PackPair<T>(values[4 * j + 4], values[4 * j + 5]),
                                  PackPair<T>(values[4 * j + 6], values[4 * j + 7])};
    StoreMatricesTransposed(to + 8 * j * kStagedRowBytes, matrices);
  }
}

// Asks for the residuals of a box of 64 outputs × kTokens tokens, by a whole warpgroup, into its staging area; what lies beyond
// the last output or token becomes 0. They are there for StageOutputs after WaitResiduals and a barrier of the warpgroup.
template <typename T, int kTokens>
__device__ __forceinline__ void FetchResiduals(const LinearOutput<T>& to, int64_t first_output,
                                               int64_t first_token, uint32_t staging) {
  const int chunk = threadIdx.x % 8;
  const int64_t output = first_output + 8 * chunk;
  const int64_t left = (to.out - output) * 2;
  const int present = static_cast<int>(left < 0 ? 0 : left > 16 ? 16 : left);
#pragma unroll
  for (int row = threadIdx.x % 128 / 8; row < kTokens; row += 16) {
    const int64_t token = first_token + row;
    const int bytes = token < to.tokens ? present : 0;
    const T* from = bytes > 0 ? to.residual + token * to.residual_stride + output : to.residual;
    Copy16(staging + row * kStagedRowBytes + (chunk ^ row % 8) * 16, from, bytes);
  }
  CommitCopies();
}
__device__ __forceinline__ void WaitResiduals() { WaitCopies<0>(); }

// values += the residuals of a warp's 16 outputs × kTokens tokens; arguments as StoreStaged has them.
template <typename T, int kTokens>
__device__ __forceinline__ void AddStaged(float (&values)[kTokens / 2], uint32_t from) {
#pragma unroll
  for (int j = 0; j < kTokens / 8; j += 2) {
    uint32_t matrices[4];
    LoadMatricesTransposed(matrices, from + 8 * j * kStagedRowBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = UnpackPair<T>(matrices[i]);
      values[4 * j + 2 * i] += pair.x;
      values[4 * j + 2 * i + 1] += pair.y;
    }
  }
  __syncwarp();  // all have read what they are about to overwrite
}

// The same as StoreStaged with bias, residual (FetchResiduals) and activation. `first_output` is the warp's, bias[] belongs to
// outputs first_output + lane / 4 and 8 further.
template <typename T, int kTokens = kStagedTokens>
__device__ __forceinline__ void StageOutputs(const float* acc, const float (&bias)[2],
                                             const LinearOutput<T>& to, int64_t first_output,
                                             uint32_t staging) {
  const int64_t output = first_output + threadIdx.x % 32 / 4;
  float values[kTokens / 2];
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) values[i] = acc[i] + bias[i / 2 % 2];
  if (to.residual != nullptr) AddStaged<T, kTokens>(values, staging + StagingOffset());
  Activate<T>(values, to.activation);
  if (first_output + 16 > to.out) {  // the tail of a row is zero
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i)
      values[i] = output + i / 2 % 2 * 8 < to.out ? values[i] : 0.0f;
  }
  StoreStaged<T, kTokens>(values, staging + StagingOffset());
}

}  // namespace espalier::kernels::cuda
