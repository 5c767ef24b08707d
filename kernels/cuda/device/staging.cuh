// staging.cuh — from the accumulators of wgmma with weights as the 64-row operand to the box that a tensor map stores.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/epilogue.cuh"
#include "kernels/cuda/device/ptx.cuh"

namespace espalier::kernels::cuda {

constexpr int kStagedTokens = 64;
constexpr int kStagedRowBytes = 128;  // 64 outputs of a token

// A warp's 16 outputs × 64 tokens, acc[0 .. 32), with bias and activation into its warpgroup's staging area: one 128-byte
// row a token, swizzled like the tensor map. The product came out transposed; stmatrix turns it. `first_output` is the
// warp's, bias[] belongs to outputs first_output + lane / 4 and 8 further.
template <typename T>
__device__ __forceinline__ void StageOutputs(const float* acc, const float (&bias)[2],
                                             const LinearOutput<T>& to, int64_t first_output,
                                             uint32_t staging) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int64_t output = first_output + lane / 4;
  // Lane 8m + i addresses token i of matrix m: matrices 0 and 1 are outputs 0..7 and 8..15 of 8 tokens, 2 and 3 of the
  // next 8.
  const int chunk16 = (2 * warp + lane / 8 % 2) ^ (lane % 8);
  const uint32_t row = staging + (lane / 16 * 8 + lane % 8) * kStagedRowBytes + chunk16 * 16;
  float values[kStagedTokens / 2];
#pragma unroll
  for (int i = 0; i < kStagedTokens / 2; ++i) values[i] = acc[i] + bias[i / 2 % 2];
  Activate<T>(values, to.activation);
  if (first_output + 16 > to.out) {  // the tail of a row is zero
#pragma unroll
    for (int i = 0; i < kStagedTokens / 2; ++i)
      values[i] = output + i / 2 % 2 * 8 < to.out ? values[i] : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const uint32_t matrices[4] = {PackPair<T>(values[4 * j], values[4 * j + 1]),
                                  PackPair<T>(values[4 * j + 2], values[4 * j + 3]),
                                  PackPair<T>(values[4 * j + 4], values[4 * j + 5]),
                                  PackPair<T>(values[4 * j + 6], values[4 * j + 7])};
    StoreMatricesTransposed(row + 8 * j * kStagedRowBytes, matrices);
  }
}

}  // namespace espalier::kernels::cuda
