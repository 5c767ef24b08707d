// elementwise.h — y = a ∘ b with broadcasting, and y = act(x).
//
//   Binary    y[i0, …] = a[Σ i·a_strides] ∘ b[Σ i·b_strides],  ∘ in {+, −, ×, ÷}
//   Activate  y[i] = act(x[i])
//
// Shapes   y: dims[0 .. rank), contiguous row-major; strides in ELEMENTS, 0 where an operand is
//          broadcast; the innermost stride of an operand is 0 or 1.
// Types    CPU: f32. GPU: f32, f16 or bf16; the operands of Binary may differ.
// Memory   Borrowed, nothing allocated. y may be exactly x (or an operand that is not broadcast);
//          no other overlap.
// Limits   1 <= rank <= kMaxBroadcastRank, dims >= 0 (0 elements are a no-op).
// Errors   kInvalidArgument for a rank or stride outside the limits, kUnsupported for a type that the
//          device lacks.
// Async    CPU: returns when y is written. GPU: enqueued on ctx.stream. Thread-safe: no shared state.
// Determinism  Every element depends on its own inputs only: bit-identical whatever dims and
//              threads are.
#pragma once

#include <cstdint>

#include "kernels/base/activation.h"
#include "kernels/base/dtype.h"
#include "kernels/base/kernel_context.h"
#include "kernels/base/kernel_status.h"

namespace espalier::kernels {

// One line per operation: enumerator, ONNX (and Highway) name, C++ operator.
#define ESPALIER_BINARY_OPS(X) \
  X(kAdd, Add, +)              \
  X(kSub, Sub, -)              \
  X(kMul, Mul, *)              \
  X(kDiv, Div, /)

enum class BinaryOp : uint8_t {
#define ESPALIER_BINARY_ENUM(name, text, op) name,
  ESPALIER_BINARY_OPS(ESPALIER_BINARY_ENUM)
#undef ESPALIER_BINARY_ENUM
};

inline constexpr int kMaxBroadcastRank = 8;

struct BinaryArgs {
  BinaryOp op = BinaryOp::kAdd;
  int rank = 1;
  int64_t dims[kMaxBroadcastRank] = {};
  int64_t a_strides[kMaxBroadcastRank] = {};
  int64_t b_strides[kMaxBroadcastRank] = {};
  const void* a = nullptr;
  const void* b = nullptr;
  void* y = nullptr;
  DType a_dtype = DType::kFloat32, b_dtype = DType::kFloat32, y_dtype = DType::kFloat32;
};
KernelStatus Binary(const KernelContext& ctx, const BinaryArgs& args);

struct ActivateArgs {
  Activation activation = Activation::kNone;
  const void* x = nullptr;
  void* y = nullptr;
  int64_t count = 0;
  DType dtype = DType::kFloat32;
};
KernelStatus Activate(const KernelContext& ctx, const ActivateArgs& args);

}  // namespace espalier::kernels
