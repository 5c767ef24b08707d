// scratch.h — what each task of the tiled dense kernel keeps beside x, y and the weights.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/dense_linear/tiling.h"

namespace espalier::kernels {

inline constexpr int64_t kDenseBlockCols = 256;
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
