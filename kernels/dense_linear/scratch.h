// scratch.h — what each task of the tiled dense kernel keeps beside x, y and the weights.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/dense_linear/tiling.h"

namespace espalier::kernels {

// 256 columns of a tile are 64 KiB of f32 weights: they stay in L2 for all tokens of a block, and their sums are loaded
// and stored once per 256 columns (some 50 of 3,100 cycles).
inline constexpr int64_t kDenseBlockCols = 256;
// A multiple of the 6 tokens of a register tile; their sums take 60 KiB and their x, per block of columns, 240 KiB: with
// the weights that fits 1 MiB of L2.
inline constexpr int64_t kDenseTokenBlock = 240;

struct DenseTaskScratch {
  static size_t PartialBytes(const LinearDesc& desc) {
    return std::min(desc.tokens, kDenseTokenBlock) * kDenseTileRows * sizeof(float);
  }
  static size_t Bytes(const LinearDesc& desc) {
    const bool expands = desc.weight_dtype != DType::kFloat32;
    return PartialBytes(desc) + (expands ? kDenseBlockCols * kDenseTileRows * sizeof(float) : 0);
  }
  DenseTaskScratch(const LinearDesc& desc, void* scratch, int64_t task)
      : partial(static_cast<float*>(scratch) + task * Bytes(desc) / sizeof(float)),
        expanded(partial + PartialBytes(desc) / sizeof(float)) {}

  float* partial;   // sums of a tile between two blocks: [token][kDenseTileRows]
  float* expanded;  // a block of 16-bit weights as f32
};

}  // namespace espalier::kernels
