// wgmma.cuh — warpgroup matrix products of sm_90a: descriptors, ordering, and one wrapper per width.
//
// Both operands lie in shared memory, K-major (rows of `panel` 2-byte values along K) and swizzled over the row length:
// 32, 64 or 128 bytes. d[64 × n] += a[64 × 16] · b[n × 16]ᵀ; thread t of the warpgroup holds, for every 8 columns j,
// d[4j], d[4j + 1] at row 16·(t / 32) + (t % 32) / 4, columns 8j + 2·(t % 4) + {0, 1}, and d[4j + 2], d[4j + 3] 8 rows below.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/element.cuh"

namespace espalier::kernels::cuda {

// Descriptor of an operand whose rows are kRowBytes (32, 64 or 128) long; groups of 8 rows follow each other. Only the low
// word depends on the address, so that walking an operand is 32-bit arithmetic: it counts units of 16 bytes. The leading
// offset (1) is not used for swizzled K-major operands.
template <int kRowBytes>
struct Operand {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128);
  static constexpr uint32_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  static constexpr uint32_t kHigh = kSwizzle << 30 | 8 * kRowBytes / 16;

  uint32_t low;

  __device__ __forceinline__ explicit Operand(uint32_t shared_address)
      : low((shared_address & 0x3ffff) >> 4 | 1u << 16) {}
  // The operand `bytes` further on, a multiple of 16.
  __device__ __forceinline__ Operand Plus(uint32_t bytes) const {
    Operand there = *this;
    there.low += bytes / 16;
    return there;
  }
  __device__ __forceinline__ uint64_t At(uint32_t bytes) const {
    return uint64_t{kHigh} << 32 | (low + bytes / 16);
  }
};
constexpr uint32_t kProductBytes =
    32;  // one instruction consumes 16 values of K, a sparse one 32 of b

__device__ __forceinline__ void FenceProducts() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WaitProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses to accumulators across an asynchronous product.
template <int kCount>
__device__ __forceinline__ void FenceRegisters(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define ESPALIER_ACC4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ESPALIER_ACC16(i) \
  ESPALIER_ACC4(i), ESPALIER_ACC4(i + 4), ESPALIER_ACC4(i + 8), ESPALIER_ACC4(i + 12)
#define ESPALIER_ACC64(i) \
  ESPALIER_ACC16(i), ESPALIER_ACC16(i + 16), ESPALIER_ACC16(i + 32), ESPALIER_ACC16(i + 48)

#define ESPALIER_WGMMA_16(type)                                            \
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type \
               " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;" \
               : ESPALIER_ACC4(0), ESPALIER_ACC4(4)                        \
               : "l"(a), "l"(b))

#define ESPALIER_WGMMA_32(type)                                                       \
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type            \
               " {"                                                                   \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
               "}, %16, %17, 1, 1, 1, 0, 0;"                                          \
               : ESPALIER_ACC16(0)                                                    \
               : "l"(a), "l"(b))

#define ESPALIER_WGMMA_48(type)                                                         \
  asm volatile("wgmma.mma_async.sync.aligned.m64n48k16.f32." type "." type              \
               " {"                                                                     \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
               "%16, %17, %18, %19, %20, %21, %22, %23"                                 \
               "}, %24, %25, 1, 1, 1, 0, 0;"                                            \
               : ESPALIER_ACC16(0), ESPALIER_ACC4(16), ESPALIER_ACC4(20)                \
               : "l"(a), "l"(b))

#define ESPALIER_WGMMA_64(type)                                                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                      \
               " {"                                                                             \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "         \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
               "}, %32, %33, 1, 1, 1, 0, 0;"                                                    \
               : ESPALIER_ACC16(0), ESPALIER_ACC16(16)                                          \
               : "l"(a), "l"(b))

#define ESPALIER_WGMMA_128(type)                                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                       \
               " {"                                                                               \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"   \
               "}, %64, %65, 1, 1, 1, 0, 0;"                                                      \
               : ESPALIER_ACC64(0)                                                                \
               : "l"(a), "l"(b))

#define ESPALIER_WGMMA_192(type)                                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type                       \
               " {"                                                                               \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"   \
               "}, %96, %97, 1, 1, 1, 0, 0;"                                                      \
               : ESPALIER_ACC64(0), ESPALIER_ACC16(64), ESPALIER_ACC16(80)                        \
               : "l"(a), "l"(b))

#define ESPALIER_WGMMA_256(type)                                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                       \
               " {"                                                                               \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
               "%110, %111, "                                                                     \
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "   \
               "%125, %126, %127"                                                                 \
               "}, %128, %129, 1, 1, 1, 0, 0;"                                                    \
               : ESPALIER_ACC64(0), ESPALIER_ACC64(64)                                            \
               : "l"(a), "l"(b))

// d += a · bᵀ, n = 2 · kCount columns, operands of type T.
template <typename T, int kCount>
__device__ __forceinline__ void Product(float (&d)[kCount], uint64_t a, uint64_t b) {
  constexpr bool kIsBFloat16 = __is_same(T, BFloat16);
  if constexpr (kCount == 8) {
    if constexpr (kIsBFloat16)
      ESPALIER_WGMMA_16("bf16");
    else
      ESPALIER_WGMMA_16("f16");
  } else if constexpr (kCount == 16) {
    if constexpr (kIsBFloat16)
      ESPALIER_WGMMA_32("bf16");
    else
      ESPALIER_WGMMA_32("f16");
  } else if constexpr (kCount == 24) {
    if constexpr (kIsBFloat16)
      ESPALIER_WGMMA_48("bf16");
    else
      ESPALIER_WGMMA_48("f16");
  } else if constexpr (kCount == 32) {
    if constexpr (kIsBFloat16)
      ESPALIER_WGMMA_64("bf16");
    else
      ESPALIER_WGMMA_64("f16");
  } else if constexpr (kCount == 64) {
    if constexpr (kIsBFloat16)
      ESPALIER_WGMMA_128("bf16");
    else
      ESPALIER_WGMMA_128("f16");
  } else if constexpr (kCount == 96) {
    if constexpr (kIsBFloat16)
      ESPALIER_WGMMA_192("bf16");
    else
      ESPALIER_WGMMA_192("f16");
  } else if constexpr (kCount == 128) {
    if constexpr (kIsBFloat16)
      ESPALIER_WGMMA_256("bf16");
    else
      ESPALIER_WGMMA_256("f16");
  } else {
    static_assert(kCount == 0, "no wgmma of this width");
  }
}

// a: 64 × 32 with at most two non-zeros in every four neighbours of a row, of which 64 × 16 values are stored; `metadata`
// says which they are: 4 bits a group, columns 16·(lane % 2) .. + 15 of row lane / 4 of the warp's 16 (low half) and of the
// row 8 below, in lanes with lane % 4 < 2 (the others' is not read). d += a · bᵀ, n = 2 · kCount columns.
#define ESPALIER_SPARSE_WGMMA_128(type)                                                           \
  asm volatile("wgmma.mma_async.sp.sync.aligned.m64n128k32.f32." type "." type                    \
               " {"                                                                               \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
               "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
               "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
               "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"             \
               "}, %64, %65, %66, 0, 1, 1, 1, 0, 0;"                                              \
               : ESPALIER_ACC64(0)                                                                \
               : "l"(a), "l"(b), "r"(metadata))

#define ESPALIER_SPARSE_WGMMA_256(type)                                                           \
  asm volatile("wgmma.mma_async.sp.sync.aligned.m64n256k32.f32." type "." type                    \
               " {"                                                                               \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
               "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
               "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
               "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, " \
               "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
               "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, " \
               "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
               "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, "   \
               "%124, %125, %126, %127"                                                           \
               "}, %128, %129, %130, 0, 1, 1, 1, 0, 0;"                                           \
               : ESPALIER_ACC64(0), ESPALIER_ACC64(64)                                            \
               : "l"(a), "l"(b), "r"(metadata))

template <typename T, int kCount>
__device__ __forceinline__ void SparseProduct(float (&d)[kCount], uint64_t a, uint64_t b,
                                              uint32_t metadata) {
  static_assert(kCount == 64 || kCount == 128);
  constexpr bool kIsBFloat16 = __is_same(T, BFloat16);
  if constexpr (kCount == 64) {
    if constexpr (kIsBFloat16)
      ESPALIER_SPARSE_WGMMA_128("bf16");
    else
      ESPALIER_SPARSE_WGMMA_128("f16");
  } else {
    if constexpr (kIsBFloat16)
      ESPALIER_SPARSE_WGMMA_256("bf16");
    else
      ESPALIER_SPARSE_WGMMA_256("f16");
  }
}

#undef ESPALIER_ACC4
#undef ESPALIER_ACC16
#undef ESPALIER_ACC64

}  // namespace espalier::kernels::cuda
