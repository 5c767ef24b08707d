// random_weight.h — weights for the CUDA suites and benches, made in their layout (never through a dense matrix, which
// at 10,240² would cost more than the measurement).
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/linear/linear.h"

namespace espalier::kernels::testing {

// Uniform in [-1, 1): fast, reproducible.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15 + 1) {}
  uint64_t Next();
  float Unit() { return static_cast<float>(Next() >> 40) * 0x1p-23f - 1.0f; }
  int64_t Below(int64_t n) { return static_cast<int64_t>(Next() % static_cast<uint64_t>(n)); }

 private:
  uint64_t state_;
};

struct RandomWeightSpec {
  Layout layout = Layout::kDense;
  DType dtype = DType::kBFloat16;
  int64_t out = 0, in = 0;
  int32_t block_rows = 1, block_cols = 1;
  // Of blocks (block_csr), values (csr) or block-diagonals (diagonal: K = max(1, round(density · R · C / D))). 0: none.
  double density = 0.1;
  // block_csr: every block row gets the same number of blocks, up to rounding; otherwise each block is drawn by itself,
  // so that rows are ragged.
  bool even_rows = false;
  uint64_t seed = 1;
};
std::string ToString(const RandomWeightSpec& spec);

// Owns the arrays of a WeightView. Edge blocks are padded with zeros.
struct RandomWeight {
  explicit RandomWeight(const RandomWeightSpec& spec);
  WeightView view() const;

  RandomWeightSpec spec;
  int64_t count = 0;
  std::vector<int32_t> row_ptr, col_idx, offsets;
  std::vector<char> values;
  int64_t stored = 0;  // values stored, padding included
};

// [rows, width] uniform in [-1, 1), rounded to dtype, `stride` elements from row to row; what lies between is NaN.
std::vector<char> RandomRows(DType dtype, int64_t rows, int64_t width, int64_t stride,
                             Random& random);

uint16_t ToBFloat16(float value);
uint16_t ToFloat16(float value);  // subnormal results flush to zero
float FromElement(const void* array, DType dtype, int64_t i);

}  // namespace espalier::kernels::testing
