// epilogue-inl.h — what happens to the sums of a row on their way to y: residual, activation, store.
//
// Per-target include guard: every instruction set sees this file once.
#if defined(ESPALIER_KERNELS_LINEAR_EPILOGUE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ESPALIER_KERNELS_LINEAR_EPILOGUE_INL_H_
#undef ESPALIER_KERNELS_LINEAR_EPILOGUE_INL_H_
#else
#define ESPALIER_KERNELS_LINEAR_EPILOGUE_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/base/activation-inl.h"
#include "kernels/linear/linear.h"

HWY_BEFORE_NAMESPACE();
namespace espalier::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// to[i] = a[i] + b[i] for i in [0, n); `to` may be either.
HWY_INLINE void AddArrays(const float* a, const float* b, float* to, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    hn::StoreU(hn::Add(hn::LoadU(d, a + i), hn::LoadU(d, b + i)), d, to + i);
  for (; i < n; ++i) to[i] = a[i] + b[i];
}

// y[token, row + r] = act(sums[r] + residual[token, row + r]) for r in [0, rows); the bias is in the sums. They may be that
// very piece of y where there is no residual.
HWY_INLINE void StoreRow(const LinearArgs& args, int64_t token, int64_t row, int64_t rows,
                         const float* sums) {
  float* y = static_cast<float*>(args.y) + token * args.y_stride + row;
  if (args.residual != nullptr) {
    const float* residual = static_cast<const float*>(args.residual);
    AddArrays(sums, residual + token * args.residual_stride + row, y, rows);
    sums = y;
  }
  if (args.activation != Activation::kNone) {
    ActivateArray(args.activation, sums, y, rows);
  } else if (sums != y) {
    std::copy_n(sums, rows, y);
  }
}

}  // namespace espalier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
