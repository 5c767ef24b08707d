// weights-inl.h — stored weights (f32, bf16, f16) as f32 vectors.
//
// Per-target include guard: every instruction set sees this file once.
#if defined(ESPALIER_KERNELS_LINEAR_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ESPALIER_KERNELS_LINEAR_WEIGHTS_INL_H_
#undef ESPALIER_KERNELS_LINEAR_WEIGHTS_INL_H_
#else
#define ESPALIER_KERNELS_LINEAR_WEIGHTS_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/base/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace espalier::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using hwy::bfloat16_t;
using hwy::float16_t;

// Calls fn(W()) with the element type of `dtype`: the one place where a run-time type becomes a
// template argument.
template <class Fn>
HWY_INLINE void WithWeightType(DType dtype, Fn fn) {
  switch (dtype) {
    case DType::kBFloat16:
      return fn(bfloat16_t());
    case DType::kFloat16:
      return fn(float16_t());
    default:
      return fn(float());
  }
}

template <class D>
HWY_INLINE hn::Vec<D> LoadWeights(D d, const float* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> LoadWeights(D d, const bfloat16_t* p) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(
                            d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)))));
}
template <class D>
HWY_INLINE hn::Vec<D> LoadWeights(D d, const float16_t* p) {
  const hn::Rebind<float16_t, D> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, p));
}

HWY_INLINE float ToFloat(const float* p) { return *p; }
HWY_INLINE float ToFloat(const bfloat16_t* p) {
  const uint32_t bits = uint32_t{p->bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
HWY_INLINE float ToFloat(const float16_t* p) {
  const hn::CappedTag<float, 1> d1;
  return hn::GetLane(LoadWeights(d1, p));
}

// Four neighbouring weights, each of which Lane<i> spreads over a vector. One 128-bit broadcast
// load and a shuffle per lane instead of four broadcast loads: the kernels that use it are bound by
// the two vector loads a cycle, not by the shuffles (4096 x 4096, 90 % diagonals, 16 tokens: see
// diagonal_linear).
template <class D, typename W>
struct WeightQuad {
#if HWY_TARGET == HWY_SCALAR
  HWY_INLINE void Load(const W* p) {
    for (int i = 0; i < 4; ++i) values[i] = ToFloat(p + i);
  }
  template <int i>
  HWY_INLINE hn::Vec<D> Lane() const {
    return hn::Set(D(), values[i]);
  }
  float values[4];
#else
  HWY_INLINE void Load(const W* p) {
    if constexpr (sizeof(W) == sizeof(float)) {
      v = hn::LoadDup128(D(), p);
    } else {
      uint64_t bits;
      std::memcpy(&bits, p, sizeof(bits));
      const hn::Rebind<uint16_t, D> d16;
      const auto repeated =
          hn::BitCast(d16, hn::Set(hn::Repartition<uint64_t, decltype(d16)>(), bits));
      if constexpr (std::is_same_v<W, bfloat16_t>) {
        const hn::RebindToUnsigned<D> d32;
        v = hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(d32, repeated)));
      } else {
        v = hn::PromoteTo(D(), hn::BitCast(hn::Rebind<float16_t, D>(), repeated));
      }
    }
  }
  template <int i>
  HWY_INLINE hn::Vec<D> Lane() const {
    return hn::Broadcast<i>(v);
  }
  hn::Vec<D> v;
#endif
};

}  // namespace espalier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
