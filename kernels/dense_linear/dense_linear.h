// dense_linear.h — y = act(x · Wᵀ + b + residual) for a weight that is stored whole, on the CPU. The baseline of everything sparse.
//
// Both families read one packed form (tiling.h), so that a layer keeps one copy and may still use the better of the two
// for every batch size.
//
// DenseLinearTiled   Our own: rows in vector lanes, x broadcast, a tile of 6 tokens x 64 rows in registers. Every y is
//                    one chain of FMAs over ascending columns from the bias on: bit-identical whatever tokens and
//                    threads are. Weights f32, bf16, f16.
// DenseLinearOneDnn  oneDNN, f32, where the machine has AVX-512 (elsewhere it has no kernel for this form). Primitives
//                    are made on first use of a shape (some 200 µs) and kept in a bounded cache; oneDNN allocates a few
//                    small objects per call.
#pragma once

#include "kernels/linear/linear.h"

namespace espalier::kernels {

struct DenseLinearTiled {
  static bool Supports(const LinearDesc& desc);
  static size_t PackedBytes(const WeightView& weight);
  static KernelStatus Pack(const WeightView& weight, void* packed);
  static KernelStatus Locate(const WeightView& weight, std::span<const int64_t> elements,
                             int64_t* offsets);
  static size_t ScratchBytes(const LinearDesc& desc, int threads);
  static KernelStatus Run(const KernelContext& ctx, const LinearArgs& args);
};

struct DenseLinearOneDnn {
  static bool Supports(const LinearDesc& desc);
  static size_t PackedBytes(const WeightView& weight) {
    return DenseLinearTiled::PackedBytes(weight);
  }
  static KernelStatus Pack(const WeightView& weight, void* packed) {
    return DenseLinearTiled::Pack(weight, packed);
  }
  static KernelStatus Locate(const WeightView& weight, std::span<const int64_t> elements,
                             int64_t* offsets) {
    return DenseLinearTiled::Locate(weight, elements, offsets);
  }
  static size_t ScratchBytes(const LinearDesc& desc, int threads);
  static KernelStatus Run(const KernelContext& ctx, const LinearArgs& args);
};

}  // namespace espalier::kernels
