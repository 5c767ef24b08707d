// epilogue.cuh — bias, residual, activation and the store of four neighbouring outputs, shared by the linear kernels.
#pragma once

#include <cstdint>

#include "kernels/base/activation.h"
#include "kernels/cuda/device/element.cuh"
#include "kernels/linear/linear.h"

namespace espalier::kernels::cuda {

// gelu(x) = max(x, 0) − a·Φ(−a) with a = |x|: the tail Φ(−a) (tanh form: 1/(1 + e^2u)) is 2^R(a), R smooth, so that one
// ex2 and a short polynomial give a small RELATIVE error also where gelu is almost zero. Least-squares/minimax fit of
// log2 of the tail on [0, 6] (erf) and [0, 5] (tanh) in 30-digit arithmetic; the leading coefficients are negative, so R
// falls beyond the interval too. Largest relative error of a·Φ(−a): erf 3.7e-4 with 5 terms (bf16 rounds at 4e-3), 6e-6
// with 7; tanh 8.6e-5. |x| is clamped at 30, so that
// infinities stay what they are; NaN passes through it.
template <int kTerms>
__device__ __forceinline__ float GeluFromTail(const float (&coefficient)[kTerms], float x) {
  float a, tail;
  asm("min.NaN.f32 %0, %1, 0f41F00000;" : "=f"(a) : "f"(fabsf(x)));
  float r = coefficient[kTerms - 1];
#pragma unroll
  for (int i = kTerms - 2; i >= 0; --i) r = fmaf(r, a, coefficient[i]);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(tail) : "f"(r));
  return fmaf(-a, tail, fmaxf(x, 0.0f));
}

template <typename T>
__device__ __forceinline__ float GeluErf(float x) {
  if constexpr (__is_same(T, BFloat16)) {
    const float kTail[6] = {-1.00053179f, -1.14439964f,  -0.472785711f,
                            -0.04283272f, 0.0044676047f, -0.000201684306f};
    return GeluFromTail(kTail, x);
  } else if constexpr (sizeof(T) == 4) {
    return 0.5f * x * erfcf(-x * 0.707106781f);
  } else {
    const float kTail[8] = {-0.999995291f,  -1.15125108f,     -0.458464384f,   -0.053960074f,
                            0.00850789249f, -0.000930525304f, 6.15983517e-05f, -1.83481447e-06f};
    return GeluFromTail(kTail, x);
  }
}

__device__ __forceinline__ float TanhApproximate(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// bf16: the hardware tanh (relative error 2^-11), which makes an absolute error of at most 2^-12 · |x|; six instructions
// in an epilogue that is bound by them. fp16: the tail as above.
template <typename T>
__device__ __forceinline__ float GeluTanh(float x) {
  if constexpr (sizeof(T) == 4) {
    // x / (1 + e^-2u) does not cancel for x < 0.
    return x / (1.0f + expf(-1.59576912f * x * fmaf(0.044715f * x, x, 1.0f)));
  } else if constexpr (__is_same(T, BFloat16)) {
    const float half = 0.5f * x, u = x * fmaf(0.0356774081f, x * x, 0.797884561f);
    return fmaf(half, TanhApproximate(u), half);
  } else {
    const float kTail[8] = {-0.99987787f,  -1.1546514f,    -0.442411512f,  -0.0812497213f,
                            0.0324372947f, -0.0100884708f, 0.00123216573f, -5.61742381e-05f};
    return GeluFromTail(kTail, x);
  }
}

// Two-byte types: 2^-11 relative, half a unit in the last place of fp16.
template <typename T>
__device__ __forceinline__ float Tanh(float x) {
  return sizeof(T) == 4 ? tanhf(x) : TanhApproximate(x);
}

// values[i] = act(values[i]) for all i: one branch a call, so that the choice stays out of the unrolled loops.
template <typename T, int kCount>
__device__ __forceinline__ void Activate(float (&values)[kCount], Activation activation) {
  const auto apply = [&](auto function) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = function(values[i]);
  };
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
      apply([](float x) { return x < 0.0f ? 0.0f : x; });
      break;
    case Activation::kGeluErf:
      apply([](float x) { return GeluErf<T>(x); });
      break;
    case Activation::kGeluTanh:
      apply([](float x) { return GeluTanh<T>(x); });
      break;
    case Activation::kSigmoid:
      apply([](float x) {
        return sizeof(T) == 4 ? 1.0f / (1.0f + expf(-x)) : __fdividef(1.0f, 1.0f + __expf(-x));
      });
      break;
    case Activation::kTanh:
      apply([](float x) { return Tanh<T>(x); });
      break;
  }
}

// Where a kernel writes: y [tokens, out] with what happens on the way.
template <typename T>
struct LinearOutput {
  T* y;
  const float* bias;
  const T* residual;  // null: none; may be y, so never loaded as constant data
  int64_t y_stride;
  int64_t residual_stride;
  int64_t tokens;
  int64_t out;
  Activation activation;
};

template <typename T>
LinearOutput<T> OutputOf(const LinearArgs& args) {
  return {static_cast<T*>(args.y),
          args.bias,
          static_cast<const T*>(args.residual),
          args.y_stride,
          args.residual_stride,
          args.tokens,
          args.weight.out,
          args.activation};
}

// Outputs [column, column + 4) of one token, two a word; those at or beyond `out` stay untouched. `row` is 8-byte aligned.
template <typename T>
__device__ __forceinline__ void StoreQuad(T* row, int64_t column, int64_t out, uint32_t low,
                                          uint32_t high) {
  if (column + 4 <= out) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(row + column), "r"(low), "r"(high)
                 : "memory");
    return;
  }
  const uint32_t words[2] = {low, high};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + i < out) {
      reinterpret_cast<uint16_t*>(row)[column + i] =
          static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
    }
  }
}

__device__ __forceinline__ float BiasAt(const float* bias, int64_t column, int64_t out) {
  return bias != nullptr && column < out ? __ldg(bias + column) : 0.0f;
}

// The residual of an output, 0 without.
template <typename T>
__device__ __forceinline__ float ResidualAt(const LinearOutput<T>& to, int64_t token,
                                            int64_t column) {
  return to.residual != nullptr ? ToFloat(to.residual[token * to.residual_stride + column]) : 0.0f;
}

// Where there is a residual: those of outputs column (even) and column + 1, 0 beyond the last output or token.
template <typename T>
__device__ __forceinline__ float2 ResidualPair(const LinearOutput<T>& to, int64_t token,
                                               int64_t column) {
  if (token >= to.tokens || column >= to.out) return {};
  const T* at = to.residual + token * to.residual_stride + column;
  if (column + 1 == to.out) return {ToFloat(*at), 0.0f};
  return UnpackPair<T>(*reinterpret_cast<const uint32_t*>(at));
}

// Bias, residual, activation and store for a fragment with tokens as rows: thread (r = lane / 4, q = lane % 4) of a warp
// holds, for each 16 outputs u and half h of them, outputs 16u + 8h + 2q + {0, 1} of token r in values[8u + 4h + {0, 1}]
// and of token r + 8 in values[8u + 4h + {2, 3}]. `token` is that of row 0. Neighbouring lanes exchange halves, so that a
// thread stores four neighbouring outputs and a token's 16 outputs fill a whole 32-byte sector.
template <typename T, int kCount>
__device__ __forceinline__ void StoreTokenRows(float (&values)[kCount], const LinearOutput<T>& to,
                                               int64_t token, int64_t first_output) {
  const int lane = threadIdx.x % 32, q = lane % 4;
#pragma unroll
  for (int u = 0; u < kCount / 8; ++u) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float bias =
          BiasAt(to.bias, first_output + 16 * u + 8 * (i / 2) + 2 * q + i % 2, to.out);
      values[8 * u + 4 * (i / 2) + i % 2] += bias;
      values[8 * u + 4 * (i / 2) + i % 2 + 2] += bias;
    }
  }
  if (to.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {  // two neighbouring outputs each
      const float2 pair =
          ResidualPair(to, token + lane / 4 + 8 * (i % 2), first_output + 8 * (i / 2) + 2 * q);
      values[2 * i] += pair.x;
      values[2 * i + 1] += pair.y;
    }
  }
  Activate<T>(values, to.activation);
  const bool odd = q % 2 != 0;
  const int64_t column = first_output + (odd ? 8 + 2 * (q - 1) : 2 * q);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = token + lane / 4 + 8 * half;
#pragma unroll
    for (int u = 0; u < kCount / 8; ++u) {
      const float* v = values + 8 * u + 2 * half;
      const uint32_t low = PackPair<T>(v[0], v[1]), high = PackPair<T>(v[4], v[5]);
      const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
      if (row < to.tokens) {
        StoreQuad(to.y + row * to.y_stride, column + 16 * u, to.out, odd ? other : low,
                  odd ? high : other);
      }
    }
  }
}

}  // namespace espalier::kernels::cuda
