// element.cuh — bf16 and fp16 as one interface: packing from fp32, unpacking, and the mma.sync of the type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace espalier::kernels::cuda {

using BFloat16 = __nv_bfloat16;
using Float16 = __half;

// Two floats rounded to nearest-even into one word, `low` in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t PackPair(float low, float high) {
  uint32_t pair;
  if constexpr (sizeof(T) == 2 && __is_same(T, BFloat16)) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

template <typename T>
__device__ __forceinline__ float2 UnpackPair(uint32_t pair) {
  if constexpr (__is_same(T, BFloat16)) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

template <typename T>
__device__ __forceinline__ T FromFloat(float value) {
  if constexpr (__is_same(T, BFloat16)) {
    return __float2bfloat16_rn(value);
  } else if constexpr (__is_same(T, Float16)) {
    return __float2half_rn(value);
  } else {
    return value;
  }
}
__device__ __forceinline__ float ToFloat(float value) { return value; }
__device__ __forceinline__ float ToFloat(BFloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float ToFloat(Float16 value) { return __half2float(value); }

// d += a · b for a 16×16 (row-major) and b 16×8 (column-major), fp32 accumulation.
template <typename T>
__device__ __forceinline__ void Mma(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (__is_same(T, BFloat16)) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// d += a · b for a 16×32 (row-major) of which two of each four neighbours count, and b 32×8 (column-major), fp32
// accumulation. `a` holds those two, `metadata` which they are, in ascending order.
template <typename T>
__device__ __forceinline__ void MmaSparse(float (&d)[4], const uint32_t (&a)[4],
                                          const uint32_t (&b)[4], uint32_t metadata) {
  if constexpr (__is_same(T, BFloat16)) {
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 {%0, %1, %2, "
        "%3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0x0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),
          "r"(metadata));
  } else {
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0, %1, %2, "
        "%3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0x0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),
          "r"(metadata));
  }
}

}  // namespace espalier::kernels::cuda
