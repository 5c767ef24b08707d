// panel-inl.h — token panels: how kernels that put tokens into vector lanes see x, and how their
// tiles get back to y.
//
//   panel[c · width + lane] = x[token lane, c]       tile of y: tile[r · width + lane] = y[token lane, row r]
//
// With weights broadcast and tokens in lanes there are no gathers whatever the sparsity pattern;
// the transpositions are 4 x 4 blocks in registers.
//
// Per-target include guard: every instruction set sees this file once.
#if defined(ESPALIER_KERNELS_LINEAR_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ESPALIER_KERNELS_LINEAR_PANEL_INL_H_
#undef ESPALIER_KERNELS_LINEAR_PANEL_INL_H_
#else
#define ESPALIER_KERNELS_LINEAR_PANEL_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/base/activation-inl.h"
#include "kernels/linear/linear.h"

HWY_BEFORE_NAMESPACE();
namespace espalier::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// to[c · to_stride + r] = from[r · from_stride + c] for r in [0, rows), c in [0, cols); with kAdd plus
// add[c · add_stride + r], which may be that element of `to`.
template <bool kAdd = false>
HWY_INLINE void Transpose(const float* from, int64_t from_stride, int64_t rows, int64_t cols,
                          float* to, int64_t to_stride, const float* add = nullptr,
                          int64_t add_stride = 0) {
  int64_t r = 0;
  const auto PutOne = [&](float value, int64_t c, int64_t at) {
    to[c * to_stride + at] = kAdd ? value + add[c * add_stride + at] : value;
  };
#if HWY_TARGET != HWY_SCALAR
  const hn::FixedTag<float, 4> d;
  const auto Put = [&](hn::Vec<hn::FixedTag<float, 4>> v, int64_t c) HWY_ATTR {
    if constexpr (kAdd) v = hn::Add(v, hn::LoadU(d, add + c * add_stride + r));
    hn::StoreU(v, d, to + c * to_stride + r);
  };
  for (; r + 4 <= rows; r += 4) {
    const float* p = from + r * from_stride;
    int64_t c = 0;
    for (; c + 4 <= cols; c += 4) {
      const auto a0 = hn::LoadU(d, p + c), a1 = hn::LoadU(d, p + from_stride + c);
      const auto a2 = hn::LoadU(d, p + 2 * from_stride + c),
                 a3 = hn::LoadU(d, p + 3 * from_stride + c);
      const auto low01 = hn::InterleaveLower(d, a0, a1), high01 = hn::InterleaveUpper(d, a0, a1);
      const auto low23 = hn::InterleaveLower(d, a2, a3), high23 = hn::InterleaveUpper(d, a2, a3);
      Put(hn::ConcatLowerLower(d, low23, low01), c);
      Put(hn::ConcatUpperUpper(d, low23, low01), c + 1);
      Put(hn::ConcatLowerLower(d, high23, high01), c + 2);
      Put(hn::ConcatUpperUpper(d, high23, high01), c + 3);
    }
    for (; c < cols; ++c) {
      for (int64_t i = 0; i < 4; ++i) PutOne(p[i * from_stride + c], c, r + i);
    }
  }
#endif
  for (; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) PutOne(from[r * from_stride + c], c, r);
  }
}

// Columns [0, cols) of `tokens` rows of x into a panel of `width` >= tokens lanes; lanes without a
// token become 0.
HWY_INLINE void FillPanel(const float* x, int64_t x_stride, int64_t tokens, int64_t cols,
                          float* panel, int64_t width) {
  // One cache line of columns at a time: rows of x are a power of two apart more often than not,
  // and 16 of them evict each other from L1 when every row is walked to its end.
  constexpr int64_t kLine = 16;
  for (int64_t c = 0; c < cols; c += kLine) {
    Transpose(x + c, x_stride, tokens, std::min(kLine, cols - c), panel + c * width, width);
  }
  if (tokens == width) return;
  for (int64_t c = 0; c < cols; ++c)
    std::fill(panel + c * width + tokens, panel + (c + 1) * width, 0.0f);
}

// y[token + t, row + r] = act(tile[r, t] + residual[token + t, row + r]) for a tile of `rows` rows and `width` lanes, of which
// `tokens` are used (bias already in it); changes the tile.
HWY_INLINE void StoreTile(const LinearArgs& args, int64_t token, int64_t tokens, int64_t row,
                          int64_t rows, float* tile, int64_t width) {
  float* y = static_cast<float*>(args.y) + token * args.y_stride + row;
  const int64_t stride = args.residual_stride;
  const float* residual = static_cast<const float*>(args.residual);
  if (residual != nullptr) residual += token * stride + row;
  const bool activates = args.activation != Activation::kNone;
  // Four tokens at a time: lines of more rows of y would evict each other from L1, as above.
  if (residual != nullptr && activates) {
    for (int64_t t = 0; t < tokens; t += 4) {
      Transpose<true>(residual + t * stride, stride, std::min<int64_t>(4, tokens - t), rows,
                      tile + t, width, tile + t, width);
    }
  }
  if (activates) ActivateArray(args.activation, tile, tile, rows * width);
  for (int64_t t = 0; t < tokens; t += 4) {
    const int64_t some = std::min<int64_t>(4, tokens - t);
    float* to = y + t * args.y_stride;
    if (residual != nullptr && !activates) {
      Transpose<true>(tile + t, width, rows, some, to, args.y_stride, residual + t * stride,
                      stride);
    } else {
      Transpose(tile + t, width, rows, some, to, args.y_stride);
    }
  }
}

}  // namespace espalier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
