#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/elementwise/cpu.cc"
#include "hwy/foreach_target.h"  // must precede highway.h: compiles this file once per instruction set
// clang-format off
#include "hwy/highway.h"
#include "kernels/base/activation-inl.h"
// clang-format on
#include <algorithm>

#include "kernels/cuda/op_table.h"
#include "kernels/elementwise/elementwise.h"

HWY_BEFORE_NAMESPACE();
namespace espalier::kernels::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// One functor per operation, for vectors and for the scalars of a tail.
#define ESPALIER_BINARY_FUNCTOR(name, text, op)                 \
  struct name {                                                 \
    template <class V>                                          \
    HWY_INLINE V operator()(V a, V b) const {                   \
      return hn::text(a, b);                                    \
    }                                                           \
    float operator()(float a, float b) const { return a op b; } \
  };
ESPALIER_BINARY_OPS(ESPALIER_BINARY_FUNCTOR)
#undef ESPALIER_BINARY_FUNCTOR

// y[0, n) from operands that advance by 0 or 1 element.
template <class Op>
void BinaryRow(Op op, const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* y,
               int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  if (a_stride == 1 && b_stride == 1) {
    for (; i + lanes <= n; i += lanes)
      hn::StoreU(op(hn::LoadU(d, a + i), hn::LoadU(d, b + i)), d, y + i);
  } else if (a_stride == 1) {
    const auto constant = hn::Set(d, *b);
    for (; i + lanes <= n; i += lanes) hn::StoreU(op(hn::LoadU(d, a + i), constant), d, y + i);
  } else if (b_stride == 1) {
    const auto constant = hn::Set(d, *a);
    for (; i + lanes <= n; i += lanes) hn::StoreU(op(constant, hn::LoadU(d, b + i)), d, y + i);
  }
  for (; i < n; ++i) y[i] = op(a[i * a_stride], b[i * b_stride]);
}

// Rows [begin, end) of the outer dimensions, walked like an odometer.
template <class Op>
void BinaryRows(Op op, const BinaryArgs& args, int64_t begin, int64_t end) {
  const int inner = args.rank - 1;
  const int64_t n = args.dims[inner];
  int64_t index[kMaxBroadcastRank] = {};
  const float* a = static_cast<const float*>(args.a);
  const float* b = static_cast<const float*>(args.b);
  float* y = static_cast<float*>(args.y);
  int64_t rest = begin;
  for (int axis = inner - 1; axis >= 0; --axis) {
    index[axis] = rest % args.dims[axis];
    rest /= args.dims[axis];
    a += index[axis] * args.a_strides[axis];
    b += index[axis] * args.b_strides[axis];
  }
  for (int64_t row = begin; row < end; ++row) {
    BinaryRow(op, a, args.a_strides[inner], b, args.b_strides[inner], y + row * n, n);
    for (int axis = inner - 1; axis >= 0; --axis) {
      a += args.a_strides[axis];
      b += args.b_strides[axis];
      if (++index[axis] < args.dims[axis]) break;
      a -= args.dims[axis] * args.a_strides[axis];
      b -= args.dims[axis] * args.b_strides[axis];
      index[axis] = 0;
    }
  }
}

void BinaryRange(const BinaryArgs& args, int64_t begin, int64_t end) {
  switch (args.op) {
#define ESPALIER_BINARY_CASE(name, text, op) \
  case BinaryOp::name:                       \
    return BinaryRows(name(), args, begin, end);
    ESPALIER_BINARY_OPS(ESPALIER_BINARY_CASE)
#undef ESPALIER_BINARY_CASE
  }
}

void ActivateRange(Activation activation, const float* x, float* y, int64_t n) {
  ActivateArray(activation, x, y, n);
}

}  // namespace
}  // namespace espalier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace espalier::kernels {

HWY_EXPORT(BinaryRange);
HWY_EXPORT(ActivateRange);

// Elements per task: a task below some 10 µs costs more to hand out than to do.
constexpr int64_t kTaskElements = 32768;

KernelStatus Binary(const KernelContext& ctx, const BinaryArgs& args) {
  if (ctx.ops != nullptr) return ctx.ops->binary(ctx, args);
  for (DType dtype : {args.a_dtype, args.b_dtype, args.y_dtype}) {
    if (ctx.arch != Arch::kCpu || dtype != DType::kFloat32)
      return {KernelCode::kUnsupported, "Binary: f32 on the CPU, or a device's own kernels"};
  }
  if (args.rank < 1 || args.rank > kMaxBroadcastRank) {
    return {KernelCode::kInvalidArgument, "Binary: rank outside [1, kMaxBroadcastRank]"};
  }
  const int inner = args.rank - 1;
  const int64_t a_inner = args.a_strides[inner], b_inner = args.b_strides[inner];
  if (a_inner < 0 || a_inner > 1 || b_inner < 0 || b_inner > 1) {
    return {KernelCode::kInvalidArgument, "Binary: innermost stride is neither 0 nor 1"};
  }
  int64_t rows = 1;
  for (int axis = 0; axis < inner; ++axis) rows *= args.dims[axis];
  if (rows <= 0 || args.dims[inner] <= 0) return {};
  if (args.rank == 1) {
    // One long row: cut it, since there are no rows to hand out.
    ctx.ParallelFor((args.dims[0] + kTaskElements - 1) / kTaskElements, [&](int64_t task) {
      BinaryArgs part = args;
      part.a = static_cast<const float*>(args.a) + task * kTaskElements * a_inner;
      part.b = static_cast<const float*>(args.b) + task * kTaskElements * b_inner;
      part.y = static_cast<float*>(args.y) + task * kTaskElements;
      part.dims[0] = std::min(kTaskElements, args.dims[0] - task * kTaskElements);
      HWY_DYNAMIC_DISPATCH(BinaryRange)(part, 0, 1);
    });
    return {};
  }
  const int64_t step = std::max<int64_t>(1, kTaskElements / args.dims[inner]);
  ctx.ParallelFor((rows + step - 1) / step, [&](int64_t task) {
    HWY_DYNAMIC_DISPATCH(BinaryRange)(args, task * step, std::min(rows, (task + 1) * step));
  });
  return {};
}

KernelStatus Activate(const KernelContext& ctx, const ActivateArgs& args) {
  if (ctx.ops != nullptr) return ctx.ops->activate(ctx, args);
  if (ctx.arch != Arch::kCpu || args.dtype != DType::kFloat32)
    return {KernelCode::kUnsupported, "Activate: f32 on the CPU, or a device's own kernels"};
  if (args.count < 0) return {KernelCode::kInvalidArgument, "Activate: negative count"};
  ctx.ParallelFor((args.count + kTaskElements - 1) / kTaskElements, [&](int64_t task) {
    const int64_t begin = task * kTaskElements;
    HWY_DYNAMIC_DISPATCH(ActivateRange)
    (args.activation, static_cast<const float*>(args.x) + begin,
     static_cast<float*>(args.y) + begin, std::min(kTaskElements, args.count - begin));
  });
  return {};
}

}  // namespace espalier::kernels
#endif  // HWY_ONCE
