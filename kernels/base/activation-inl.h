// activation-inl.h — the activations of activation.h on vectors; Activate(d, activation, v) and ActivateArray(…).
//
// Accuracy   Relative error of every function below 4·2⁻²⁴ + that of exp (≤ 2 ulp) where the result is normal; results
//            below 2⁻¹²⁶ become 0. ±inf gives the limit, or NaN where the formula in activation.h does (gelu of -inf).
// NaN        stays NaN, in relu too.
// Coefficients are Chebyshev interpolants made for this file (degree and error beside each).
//
// Per-target include guard: every instruction set sees this file once.
#if defined(ESPALIER_KERNELS_BASE_ACTIVATION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ESPALIER_KERNELS_BASE_ACTIVATION_INL_H_
#undef ESPALIER_KERNELS_BASE_ACTIVATION_INL_H_
#else
#define ESPALIER_KERNELS_BASE_ACTIVATION_INL_H_
#endif

#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "kernels/base/activation.h"

HWY_BEFORE_NAMESPACE();
namespace espalier::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// c0 + x·(c1 + x·(c2 + …)).
template <class D, class V, typename... Rest>
HWY_INLINE V Polynomial(D d, V x, float c0, Rest... rest) {
  if constexpr (sizeof...(rest) == 0) {
    return hn::Set(d, c0);
  } else {
    return hn::MulAdd(Polynomial(d, x, static_cast<float>(rest)...), x, hn::Set(d, c0));
  }
}

// e^x; 0 below -87.33 (where the result would be subnormal), inf above 88.72.
template <class D, class V>
HWY_INLINE V Exp(D d, V x) {
  const hn::RebindToSigned<D> di;
  // Saturated only so that 2^n below is a valid pattern; the two selections at the end give the final answer.
  const V n = hn::Round(hn::Min(hn::Max(hn::Mul(x, hn::Set(d, 1.44269504f)), hn::Set(d, -126.0f)),
                                hn::Set(d, 128.0f)));
  // ln 2 in two parts: n · 0.693145752 is exact for |n| < 2⁹.
  const V r =
      hn::MulAdd(n, hn::Set(d, -1.42860677e-6f), hn::MulAdd(n, hn::Set(d, -0.693145752f), x));
  // Degree 6 on |r| <= ln2 / 2, relative error 2.0e-8.
  const V p = Polynomial(d, r, 1.0f, 1.0000000378f, 0.50000000472f, 0.16666415148f, 0.041666352438f,
                         0.0083751569547f, 0.0013941146603f);
  // 2^n = 2^(n-1) · 2, so that n = 128 does not overflow the exponent field before the multiplication.
  const auto exponent = hn::Add(hn::ConvertTo(di, n), hn::Set(di, 126));
  const V scale = hn::BitCast(d, hn::ShiftLeft<23>(exponent));
  V y = hn::Mul(hn::Add(p, p), scale);
  y = hn::IfThenElse(hn::Gt(x, hn::Set(d, 88.72f)),
                     hn::Set(d, std::numeric_limits<float>::infinity()), y);
  y = hn::IfThenElse(hn::Lt(x, hn::Set(d, -87.33f)), hn::Zero(d), y);
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

template <class D, class V>
HWY_INLINE V Relu(D d, V x) {
  return hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Zero(d), x);  // not Max: that would hide a NaN
}

template <class D, class V>
HWY_INLINE V Sigmoid(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, Exp(d, hn::Neg(x))));
}

template <class D, class V>
HWY_INLINE V Tanh(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  const V magnitude = hn::Abs(x);
  const V s = hn::Mul(x, x);
  // |x| < 0.625: x + x³ · P(x²), degree 5, error 4.8e-9; beyond: 1 - 2 / (e^2|x| + 1), which does not cancel there.
  const V p = Polynomial(d, s, -0.33333333173f, 0.13333303557f, -0.053959259590f, 0.021768918714f,
                         -0.0083439456567f, 0.0022927449333f);
  const V small = hn::MulAdd(hn::Mul(x, s), p, x);
  const V e = Exp(d, hn::Add(magnitude, magnitude));
  const V large = hn::CopySign(hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(e, one))), x);
  return hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0.625f)), small, large);
}

// x/2 · (1 + tanh u) = x / (1 + e^-2u), u = √(2/π)(x + 0.044715 x³): no cancellation for x < 0.
template <class D, class V>
HWY_INLINE V GeluTanh(D d, V x) {
  const V cubic = hn::MulAdd(hn::Mul(x, x), hn::Set(d, 0.044715f), hn::Set(d, 1.0f));
  const V u2 = hn::Mul(hn::Mul(x, cubic), hn::Set(d, -1.5957691216f));
  return hn::Div(x, hn::Add(hn::Set(d, 1.0f), Exp(d, u2)));
}

// x/2 · (1 + erf(x/√2)), through erfc(t) = k · P(k) · e^-t², k = 1 / (1 + 0.3 t), t = |x|/√2, so that the left tail
// keeps its relative accuracy. P: degree 8 on t in [0, 9.3], relative error 2.9e-8.
template <class D, class V>
HWY_INLINE V GeluErf(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  const V t = hn::Mul(hn::Abs(x), hn::Set(d, 0.70710678119f));
  const V k = hn::Div(one, hn::MulAdd(t, hn::Set(d, 0.3f), one));
  const V p =
      Polynomial(d, k, 0.16917664190f, 0.17088952464f, 0.14721168466f, 0.21894825606f,
                 -0.10332091776f, 0.55930837042f, -0.52167803808f, 0.48980369472f, -0.13033923600f);
  const V erfc = hn::Mul(hn::Mul(k, p), Exp(d, hn::Mul(hn::Mul(x, x), hn::Set(d, -0.5f))));
  const V half = hn::Mul(x, hn::Set(d, 0.5f));
  return hn::Mul(half,
                 hn::IfThenElse(hn::Lt(x, hn::Zero(d)), erfc, hn::Sub(hn::Set(d, 2.0f), erfc)));
}

template <class D, class V>
HWY_INLINE V Activate(D d, Activation activation, V v) {
  switch (activation) {
    case Activation::kNone:
      return v;
    case Activation::kRelu:
      return Relu(d, v);
    case Activation::kGeluErf:
      return GeluErf(d, v);
    case Activation::kGeluTanh:
      return GeluTanh(d, v);
    case Activation::kSigmoid:
      return Sigmoid(d, v);
    case Activation::kTanh:
      return Tanh(d, v);
  }
  return v;
}

// y[i] = act(x[i]) for i in [0, n); y may be x. Not inlined: five copies of the code above in every epilogue would
// cost more in instruction cache than one call per row segment.
HWY_NOINLINE inline void ActivateArray(Activation activation, const float* x, float* y, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    hn::StoreU(Activate(d, activation, hn::LoadU(d, x + i)), d, y + i);
  if (i == n) return;
  HWY_ALIGN float tail[HWY_MAX_BYTES / sizeof(float)] = {};
  for (int64_t j = i; j < n; ++j) tail[j - i] = x[j];
  hn::Store(Activate(d, activation, hn::Load(d, tail)), d, tail);
  for (int64_t j = i; j < n; ++j) y[j] = tail[j - i];
}

}  // namespace espalier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
