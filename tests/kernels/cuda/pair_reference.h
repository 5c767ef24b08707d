// pair_reference.h — the oracle of fused pairs of layers: the two products in double, and how far from them a kernel may be.
#pragma once

#include <string>
#include <vector>

#include "kernels/linear_pair/linear_pair.h"
#include "tests/kernels/cuda/random_weight.h"

namespace espalier::kernels::testing {

// Where a problem's residual lies.
enum class Residual : uint8_t { kNone, kApart, kInY };
constexpr const char* NameOf(Residual residual) {
  return residual == Residual::kNone    ? ""
         : residual == Residual::kApart ? "residual "
                                        : "residual in y ";
}

// Half a unit in the last place of 1.
constexpr double HalfUlp(DType dtype) {
  return dtype == DType::kBFloat16 ? 0x1p-8 : dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-24;
}

// Error allowed beyond the rounding of the result to `dtype`: half a unit in the last place, the activation's own error
// (epilogue.cuh; a few ulp of fp32 otherwise), and 1.13 (the steepest slope of an activation) times what fp32 summation of
// `terms` products loses: n·u in any order, 8√n·u because rounding errors are independent enough (Higham and Mary, 2019).
// `magnitude` is Σ|x·w| + |b| + |residual|.
double LinearTolerance(DType dtype, Activation activation, double expected, double magnitude,
                       double terms);

// A pair on the host: x [tokens, first.in], y and residual [tokens, second.out] in the weights' type, contiguous; biases and
// residual may be null.
struct HostPair {
  const RandomWeight &first, &second;
  const float *first_bias = nullptr, *second_bias = nullptr;
  Activation first_activation = Activation::kNone, second_activation = Activation::kNone;
  int64_t tokens = 0;
  const void* residual = nullptr;
};

// Empty when every y is within tolerance: what each hidden value may be off by, LinearTolerance, weighted with the second
// layer's |W| and its activation's slope, plus LinearTolerance of the second product.
std::string ComparePair(const HostPair& pair, const void* x, const void* y);

}  // namespace espalier::kernels::testing
