#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/layer_norm/cpu.cc"
#include "hwy/foreach_target.h"  // must precede highway.h: compiles this file once per instruction set
// clang-format off
#include "hwy/highway.h"
// clang-format on
#include <algorithm>
#include <cmath>

#include "kernels/cuda/op_table.h"
#include "kernels/layer_norm/layer_norm.h"

HWY_BEFORE_NAMESPACE();
namespace espalier::kernels::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Σ f(x[i]) over two vectors (to hide the latency of the addition) and a scalar tail.
template <class VectorFn, class ScalarFn>
HWY_INLINE float SumOf(const float* x, int64_t n, VectorFn vector_fn, ScalarFn scalar_fn) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    sum0 = hn::Add(sum0, vector_fn(hn::LoadU(d, x + i)));
    sum1 = hn::Add(sum1, vector_fn(hn::LoadU(d, x + i + lanes)));
  }
  float tail = 0;
  for (; i < n; ++i) tail += scalar_fn(x[i]);
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1))) + tail;
}

void LayerNormRow(const LayerNormArgs& args, const float* x, float* y) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d)), n = args.n;
  const float count = static_cast<float>(n);
  const float mean = SumOf(
                         x, n, [](auto v) { return v; }, [](float v) { return v; }) /
                     count;
  const auto vmean = hn::Set(d, mean);
  const float variance = SumOf(
                             x, n,
                             [&](auto v) {
                               const auto centred = hn::Sub(v, vmean);
                               return hn::Mul(centred, centred);
                             },
                             [&](float v) { return (v - mean) * (v - mean); }) /
                         count;
  const float inverse = 1.0f / std::sqrt(variance + args.epsilon);
  const auto vinverse = hn::Set(d, inverse);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto normal = hn::Mul(hn::Sub(hn::LoadU(d, x + i), vmean), vinverse);
    const auto scale = hn::LoadU(d, args.scale + i);
    hn::StoreU(
        args.bias ? hn::MulAdd(normal, scale, hn::LoadU(d, args.bias + i)) : hn::Mul(normal, scale),
        d, y + i);
  }
  for (; i < n; ++i) {
    const float scaled = (x[i] - mean) * inverse * args.scale[i];
    y[i] = args.bias ? scaled + args.bias[i] : scaled;
  }
}

void LayerNormRows(const LayerNormArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    LayerNormRow(args, static_cast<const float*>(args.x) + row * args.n,
                 static_cast<float*>(args.y) + row * args.n);
}

}  // namespace
}  // namespace espalier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace espalier::kernels {

HWY_EXPORT(LayerNormRows);

KernelStatus LayerNorm(const KernelContext& ctx, const LayerNormArgs& args) {
  if (ctx.ops != nullptr) return ctx.ops->layer_norm(ctx, args);
  if (ctx.arch != Arch::kCpu || args.dtype != DType::kFloat32)
    return {KernelCode::kUnsupported, "LayerNorm: f32 on the CPU, or a device's own kernels"};
  if (args.rows < 0 || args.n < 1)
    return {KernelCode::kInvalidArgument, "LayerNorm: rows below 0 or n below 1"};
  // Some 10 µs of work per task: smaller ones cost more to hand out than to do.
  const int64_t step = std::max<int64_t>(1, 32768 / args.n);
  ctx.ParallelFor((args.rows + step - 1) / step, [&](int64_t task) {
    HWY_DYNAMIC_DISPATCH(LayerNormRows)(args, task * step, std::min(args.rows, (task + 1) * step));
  });
  return {};
}

}  // namespace espalier::kernels
#endif  // HWY_ONCE
