#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/softmax/cpu.cc"
#include "hwy/foreach_target.h"  // must precede highway.h: compiles this file once per instruction set
// clang-format off
#include "hwy/highway.h"
#include "kernels/base/activation-inl.h"
// clang-format on
#include <algorithm>
#include <limits>

#include "kernels/cuda/op_table.h"
#include "kernels/softmax/softmax.h"

HWY_BEFORE_NAMESPACE();
namespace espalier::kernels::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The first `count` lanes from memory, the others `fill`; never reads beyond.
HWY_INLINE V LoadTail(D d, const float* from, int64_t count, float fill) {
  HWY_ALIGN float padded[HWY_MAX_BYTES / sizeof(float)];
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < lanes; ++i) padded[i] = i < count ? from[i] : fill;
  return hn::Load(d, padded);
}

HWY_INLINE void StoreTail(V v, D d, float* to, int64_t count) {
  HWY_ALIGN float padded[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(v, d, padded);
  std::copy(padded, padded + count, to);
}

// Contiguous rows: three passes over data that is in the cache.
void SoftmaxRow(const float* x, float* y, int64_t n) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t whole = n / lanes * lanes, rest = n - whole;
  V top = hn::Set(d, kLowest);
  for (int64_t i = 0; i < whole; i += lanes) top = hn::Max(top, hn::LoadU(d, x + i));
  if (rest) top = hn::Max(top, LoadTail(d, x + whole, rest, kLowest));
  top = hn::MaxOfLanes(d, top);

  V sum = hn::Zero(d);
  for (int64_t i = 0; i < whole; i += lanes) {
    const V e = Exp(d, hn::Sub(hn::LoadU(d, x + i), top));
    sum = hn::Add(sum, e);
    hn::StoreU(e, d, y + i);
  }
  if (rest) {
    // The padding is −∞ below a finite maximum: e^−∞ adds nothing to the sum. (A row of −∞ only is
    // NaN anyway.)
    const V e = Exp(d, hn::Sub(LoadTail(d, x + whole, rest, kLowest), top));
    sum = hn::Add(sum, e);
    StoreTail(e, d, y + whole, rest);
  }
  sum = hn::SumOfLanes(d, sum);
  for (int64_t i = 0; i < whole; i += lanes)
    hn::StoreU(hn::Div(hn::LoadU(d, y + i), sum), d, y + i);
  if (rest) StoreTail(hn::Div(LoadTail(d, y + whole, rest, 0), sum), d, y + whole, rest);
}

// `count` <= lanes neighbouring columns of an [n, inner] slice, each a softmax of its own.
void SoftmaxColumns(const float* x, float* y, int64_t n, int64_t inner, int64_t count) {
  const D d;
  const bool full = count == static_cast<int64_t>(hn::Lanes(d));
  const auto load = [&](const float* p) {
    return full ? hn::LoadU(d, p) : LoadTail(d, p, count, 0);
  };
  const auto store = [&](V v, float* p) { full ? hn::StoreU(v, d, p) : StoreTail(v, d, p, count); };
  V top = hn::Set(d, kLowest);
  for (int64_t i = 0; i < n; ++i) top = hn::Max(top, load(x + i * inner));
  V sum = hn::Zero(d);
  for (int64_t i = 0; i < n; ++i) {
    const V e = Exp(d, hn::Sub(load(x + i * inner), top));
    sum = hn::Add(sum, e);
    store(e, y + i * inner);
  }
  for (int64_t i = 0; i < n; ++i) store(hn::Div(load(y + i * inner), sum), y + i * inner);
}

void SoftmaxSlices(const SoftmaxArgs& args, int64_t begin, int64_t end) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(D()));
  for (int64_t slice = begin; slice < end; ++slice) {
    const float* x = static_cast<const float*>(args.x) + slice * args.n * args.inner;
    float* y = static_cast<float*>(args.y) + slice * args.n * args.inner;
    if (args.inner == 1) {
      SoftmaxRow(x, y, args.n);
      continue;
    }
    for (int64_t j = 0; j < args.inner; j += lanes) {
      SoftmaxColumns(x + j, y + j, args.n, args.inner, std::min(lanes, args.inner - j));
    }
  }
}

}  // namespace
}  // namespace espalier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace espalier::kernels {

HWY_EXPORT(SoftmaxSlices);

KernelStatus Softmax(const KernelContext& ctx, const SoftmaxArgs& args) {
  if (ctx.ops != nullptr) return ctx.ops->softmax(ctx, args);
  if (ctx.arch != Arch::kCpu || args.dtype != DType::kFloat32)
    return {KernelCode::kUnsupported, "Softmax: f32 on the CPU, or a device's own kernels"};
  if (args.outer < 0 || args.n < 1 || args.inner < 0) {
    return {KernelCode::kInvalidArgument, "Softmax: outer or inner below 0, or n below 1"};
  }
  if (args.inner == 0) return {};
  // Some 10 µs of exponentials per task: smaller ones cost more to hand out than to do.
  const int64_t step = std::max<int64_t>(1, 8192 / (args.n * args.inner));
  ctx.ParallelFor((args.outer + step - 1) / step, [&](int64_t task) {
    HWY_DYNAMIC_DISPATCH(SoftmaxSlices)(args, task * step, std::min(args.outer, (task + 1) * step));
  });
  return {};
}

}  // namespace espalier::kernels
#endif  // HWY_ONCE
