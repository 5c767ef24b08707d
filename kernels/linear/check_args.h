// check_args.h — what every linear kernel refuses before it touches memory.
#pragma once

#include "kernels/linear/linear.h"

namespace espalier::kernels {

// What breaks the contract about the residual, on every device; null: nothing.
inline const char* WrongResidual(const LinearArgs& args) {
  if (args.residual == nullptr || args.tokens <= 1) return nullptr;
  if (args.residual_stride < args.weight.out)
    return "linear: the residual's row stride is below the row's width";
  if (args.residual == args.y && args.residual_stride != args.y_stride)
    return "linear: a residual in the memory of y needs the row stride of y";
  return nullptr;
}

inline KernelStatus CheckLinearArgs(const LinearArgs& args, bool reads_packed) {
  const WeightView& w = args.weight;
  const auto invalid = [](const char* message) {
    return KernelStatus{KernelCode::kInvalidArgument, message};
  };
  if (args.tokens < 0) return invalid("linear: negative token count");
  if (w.out < 1 || w.in < 1) return invalid("linear: weight without rows or columns");
  if (args.tokens == 0) return {};
  if (args.x == nullptr || args.y == nullptr) return invalid("linear: x or y is null");
  if (args.tokens > 1 && (args.x_stride < w.in || args.y_stride < w.out)) {
    return invalid("linear: row stride below the row's width");
  }
  if (const char* wrong = WrongResidual(args); wrong != nullptr) return invalid(wrong);
  if (reads_packed ? w.packed == nullptr : (w.values == nullptr && w.count > 0)) {
    return invalid(reads_packed ? "linear: weight is not packed for this variant"
                                : "linear: values are null");
  }
  return {};
}

}  // namespace espalier::kernels
