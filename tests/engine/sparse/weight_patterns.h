// weight_patterns.h — dense weights with a chosen pattern of zeros, from a fixed seed.
#pragma once

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "engine/sparse/sparse_weight.h"
#include "engine/tensor/tensor.h"

namespace espalier::sparse {

using Random = std::mt19937_64;

inline bool Chance(Random& random, double p) {
  return std::uniform_real_distribution<double>(0, 1)(random) < p;
}

// A normal number, never zero, in the bits of `dtype`.
inline uint32_t RandomValueBits(Random& random, DType dtype) {
  float value = std::uniform_real_distribution<float>(0.01f, 2.0f)(random);
  if (Chance(random, 0.5)) value = -value;
  uint32_t bits = 0;
  ConvertElements(&value, DType::kFloat32, &bits, dtype, 1);
  return bits;
}

inline uint32_t GetBits(const Tensor& weight, int64_t row, int64_t col) {
  uint32_t bits = 0;
  const size_t size = SizeOf(weight.dtype());
  std::memcpy(&bits,
              static_cast<const char*>(weight.data()) + (row * weight.shape()[1] + col) * size,
              size);
  return bits;
}

inline void SetBits(Tensor& weight, int64_t row, int64_t col, uint32_t bits) {
  const size_t size = SizeOf(weight.dtype());
  std::memcpy(static_cast<char*>(weight.data()) + (row * weight.shape()[1] + col) * size, &bits,
              size);
}

// Non-zero exactly where keep(row, col).
template <typename Keep>
Tensor MakeWeight(Random& random, int64_t out, int64_t in, Keep&& keep,
                  DType dtype = DType::kFloat32) {
  Tensor weight = *Tensor::Allocate(dtype, {out, in});
  for (int64_t r = 0; r < out; ++r) {
    for (int64_t c = 0; c < in; ++c) {
      SetBits(weight, r, c, keep(r, c) ? RandomValueBits(random, dtype) : 0);
    }
  }
  return weight;
}

inline Tensor ScatteredWeight(Random& random, int64_t out, int64_t in, double density,
                              DType dtype = DType::kFloat32) {
  return MakeWeight(
      random, out, in, [&](int64_t, int64_t) { return Chance(random, density); }, dtype);
}

// Each br×bc block whole with probability `density`; at least one block.
inline Tensor BlockWeight(Random& random, int64_t out, int64_t in, int64_t br, int64_t bc,
                          double density) {
  const int64_t rows = (out + br - 1) / br, cols = (in + bc - 1) / bc;
  std::vector<bool> keep(rows * cols);
  for (size_t i = 0; i < keep.size(); ++i) keep[i] = Chance(random, density);
  keep[random() % keep.size()] = true;
  return MakeWeight(random, out, in,
                    [&](int64_t r, int64_t c) { return keep[r / br * cols + c / bc]; });
}

// The given block-diagonals of weight_view.h, from the map itself and not from its inverse.
inline Tensor DiagonalWeight(Random& random, int64_t out, int64_t in, int64_t b,
                             const std::vector<int64_t>& offsets) {
  const int64_t R = (out + b - 1) / b, C = (in + b - 1) / b;
  std::vector<bool> keep(R * C);
  for (const int64_t o : offsets) {
    for (int64_t t = 0; t < std::min(R, C); ++t) {
      const auto [I, J] = kernels::DiagonalBlock(R, C, o, t);
      keep[I * C + J] = true;
    }
  }
  return MakeWeight(random, out, in, [&](int64_t r, int64_t c) { return keep[r / b * C + c / b]; });
}

// `count` distinct numbers below `limit`, ascending.
inline std::vector<int64_t> RandomOffsets(Random& random, int64_t count, int64_t limit) {
  std::vector<int64_t> all(limit), chosen;
  for (int64_t i = 0; i < limit; ++i) all[i] = i;
  std::sample(all.begin(), all.end(), std::back_inserter(chosen), count, random);
  return chosen;
}

inline bool SameBytes(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

}  // namespace espalier::sparse
