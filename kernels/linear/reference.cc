// reference.cc — the oracle of every linear kernel: the obvious loop in double over the stored
// values.
#include <cmath>
#include <cstring>

#include "kernels/linear/linear.h"

namespace espalier::kernels {
namespace {

double LoadElement(const void* array, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(array)[i];
    case DType::kBFloat16: {
      const uint32_t bits = uint32_t{static_cast<const uint16_t*>(array)[i]} << 16;
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      return value;
    }
    case DType::kFloat16: {
      const uint16_t bits = static_cast<const uint16_t*>(array)[i];
      const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
      const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
      if (exponent == 31) return fraction != 0 ? std::nan("") : sign * INFINITY;
      return sign * (exponent == 0 ? std::ldexp(fraction, -24)
                                   : std::ldexp(1024 + fraction, exponent - 25));
    }
    default:
      return std::nan("");
  }
}

double Activated(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < 0 ? 0.0 : x;
    case Activation::kGeluErf:
      return x / 2 * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh:
      return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kSigmoid:
      return 1 / (1 + std::exp(-x));
    case Activation::kTanh:
      return std::tanh(x);
  }
  return x;
}

// Calls fn(row, col, index into values) for every stored value inside W, in the layout's own order.
template <typename Fn>
void ForEachStored(const WeightView& w, Fn fn) {
  const int64_t R = w.block_row_count(), C = w.block_col_count(), D = w.diagonal_length();
  const auto block = [&](int64_t block_row, int64_t block_col, int64_t block_index) {
    for (int64_t r = 0; r < w.block_rows; ++r) {
      for (int64_t c = 0; c < w.block_cols; ++c) {
        const int64_t row = block_row * w.block_rows + r, col = block_col * w.block_cols + c;
        if (row < w.out && col < w.in)
          fn(row, col, (block_index * w.block_rows + r) * w.block_cols + c);
      }
    }
  };
  switch (w.layout) {
    case Layout::kDense:
      for (int64_t row = 0; row < w.out; ++row) {
        for (int64_t col = 0; col < w.in; ++col) fn(row, col, row * w.in + col);
      }
      break;
    case Layout::kCsr:
      for (int64_t row = 0; row < w.out; ++row) {
        for (int64_t i = w.row_ptr[row]; i < w.row_ptr[row + 1]; ++i)
          fn(row, int64_t{w.col_idx[i]}, i);
      }
      break;
    case Layout::kBlockCsr:
      for (int64_t row = 0; row < R; ++row) {
        for (int64_t i = w.row_ptr[row]; i < w.row_ptr[row + 1]; ++i) block(row, w.Column(i), i);
      }
      break;
    case Layout::kDiagonal:
      for (int64_t k = 0; k < w.count; ++k) {
        for (int64_t t = 0; t < D; ++t) {
          const BlockPosition at = DiagonalBlock(R, C, w.offsets[k], t);
          block(at.row, at.col, k * D + t);
        }
      }
      break;
  }
}

}  // namespace

void ReferenceLinear(const LinearArgs& args, double* y, double* magnitude) {
  const WeightView& w = args.weight;
  for (int64_t i = 0; i < args.tokens; ++i) {
    for (int64_t row = 0; row < w.out; ++row) {
      const double bias = args.bias == nullptr ? 0.0 : args.bias[row];
      const double residual =
          args.residual == nullptr
              ? 0.0
              : LoadElement(args.residual, args.io_dtype, i * args.residual_stride + row);
      y[i * w.out + row] = bias + residual;
      if (magnitude != nullptr) magnitude[i * w.out + row] = std::abs(bias) + std::abs(residual);
    }
  }
  ForEachStored(w, [&](int64_t row, int64_t col, int64_t index) {
    const double value = LoadElement(w.values, w.dtype, index);
    for (int64_t i = 0; i < args.tokens; ++i) {
      const double product = value * LoadElement(args.x, args.io_dtype, i * args.x_stride + col);
      y[i * w.out + row] += product;
      if (magnitude != nullptr) magnitude[i * w.out + row] += std::abs(product);
    }
  });
  for (int64_t i = 0; i < args.tokens * w.out; ++i) y[i] = Activated(args.activation, y[i]);
}

}  // namespace espalier::kernels
