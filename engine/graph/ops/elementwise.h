// elementwise.h — a ∘ b with multidirectional broadcasting (Add, Sub, Mul, Div) and act(x) (Relu,
// Gelu, Sigmoid, Tanh).
#pragma once

#include "absl/status/statusor.h"
#include "engine/graph/lowering.h"
#include "engine/graph/op.h"
#include "kernels/elementwise/elementwise.h"

namespace espalier::graph {

class BroadcastOp final : public Op {
 public:
  // `args` describes one item, its first dimension and strides those of the items; `row_constant`
  // is the input (0, 1) that is a constant vector along the last dimension of the other, or a
  // scalar, -1 when neither is.
  BroadcastOp(const kernels::BinaryArgs& args, int row_constant, bool in_place)
      : args_(args), row_constant_(row_constant), in_place_(in_place) {}

  kernels::KernelStatus Run(const RunContext& context, const Step& step) const override;
  int in_place_input() const override { return in_place_ ? 0 : -1; }

  kernels::BinaryOp op() const { return args_.op; }
  int row_constant() const { return row_constant_; }

 private:
  const kernels::BinaryArgs args_;
  const int row_constant_;
  const bool in_place_;
};

class ActivationOp final : public Op {
 public:
  ActivationOp(kernels::Activation activation, int64_t item_elements)
      : activation_(activation), item_elements_(item_elements) {}

  kernels::KernelStatus Run(const RunContext& context, const Step& step) const override;
  int in_place_input() const override { return 0; }

  kernels::Activation activation() const { return activation_; }

 private:
  const kernels::Activation activation_;
  const int64_t item_elements_;
};

// Emits a ∘ b. Refuses what would pair items of a batch with each other or with elements of a
// constant.
absl::StatusOr<Operand> EmitBroadcast(Lowering& lowering, kernels::BinaryOp op, const Operand& a,
                                      const Operand& b);

}  // namespace espalier::graph
