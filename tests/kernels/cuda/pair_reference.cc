#include "tests/kernels/cuda/pair_reference.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace espalier::kernels::testing {
namespace {

constexpr double kSteepest = 1.13;

// y and Σ|x·w| + |b| + |residual| of one layer.
struct Sums {
  std::vector<double> y, magnitude;
};

Sums Reference(const RandomWeight& weight, DType io_dtype, const void* x, const float* bias,
               const void* residual, Activation activation, int64_t tokens) {
  LinearArgs args;
  args.weight = weight.view();
  args.io_dtype = io_dtype;
  args.x = x;
  args.x_stride = weight.spec.in;
  args.bias = bias;
  args.residual = residual;
  args.residual_stride = weight.spec.out;
  args.activation = activation;
  args.tokens = tokens;
  Sums sums{std::vector<double>(tokens * weight.spec.out),
            std::vector<double>(tokens * weight.spec.out)};
  ReferenceLinear(args, sums.y.data(), sums.magnitude.data());
  return sums;
}

}  // namespace

double LinearTolerance(DType dtype, Activation activation, double expected, double magnitude,
                       double terms) {
  double relative = 4e-7, absolute = 0;
  if (dtype == DType::kBFloat16) {
    if (activation == Activation::kGeluErf) relative = 4e-4;
    // 2^-12 · |x|, and the hardware tanh is exactly ±1 from |x| = 6 on.
    if (activation == Activation::kGeluTanh) relative = 0x1p-11, absolute = 6 * 0x1p-12;
    if (activation == Activation::kTanh) relative = 0x1p-10;
  } else if (dtype == DType::kFloat16) {
    if (activation == Activation::kGeluErf || activation == Activation::kGeluTanh) relative = 1e-4;
    if (activation == Activation::kTanh) relative = 0x1p-10;
  }
  const double summation = kSteepest * std::min(terms + 2, 8 * std::sqrt(terms) + 2) * 0x1p-24;
  const double smallest = dtype == DType::kFloat16 ? 0x1p-24 : 0x1p-126;
  return (HalfUlp(dtype) + relative) * 1.01 * std::abs(expected) + absolute +
         summation * magnitude + smallest;
}

std::string ComparePair(const HostPair& pair, const void* x, const void* y) {
  const DType dtype = pair.first.spec.dtype;
  const int64_t hidden = pair.first.spec.out, out = pair.second.spec.out;
  const Sums first =
      Reference(pair.first, dtype, x, pair.first_bias, nullptr, pair.first_activation, pair.tokens);
  std::vector<float> between(first.y.begin(), first.y.end()), off(first.y.size());
  std::vector<float> residual(pair.residual == nullptr ? 0 : pair.tokens * out);
  for (size_t i = 0; i < residual.size(); ++i)
    residual[i] = FromElement(pair.residual, dtype, static_cast<int64_t>(i));
  for (size_t i = 0; i < off.size(); ++i) {
    off[i] = static_cast<float>(LinearTolerance(dtype, pair.first_activation, first.y[i],
                                                first.magnitude[i],
                                                static_cast<double>(pair.first.spec.in)));
  }
  const Sums second =
      Reference(pair.second, DType::kFloat32, between.data(), pair.second_bias,
                residual.empty() ? nullptr : residual.data(), pair.second_activation, pair.tokens);
  // Its magnitude is Σ|off·w|.
  const Sums carried = Reference(pair.second, DType::kFloat32, off.data(), nullptr, nullptr,
                                 Activation::kNone, pair.tokens);
  for (int64_t i = 0; i < pair.tokens * out; ++i) {
    const double allowed = kSteepest * 1.01 * carried.magnitude[i] +
                           LinearTolerance(dtype, pair.second_activation, second.y[i],
                                           second.magnitude[i], static_cast<double>(hidden + 1));
    const double actual = FromElement(y, dtype, i);
    if (std::abs(actual - second.y[i]) <= allowed) continue;  // NaN is not
    char line[200];
    std::snprintf(line, sizeof(line),
                  "token %lld output %lld: expected %.9g, actual %.9g, tolerance %.3g",
                  static_cast<long long>(i / out), static_cast<long long>(i % out), second.y[i],
                  actual, allowed);
    return line;
  }
  return "";
}

}  // namespace espalier::kernels::testing
