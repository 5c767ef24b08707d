// linear.h — y = act(x · Wᵀ + b + residual) for a constant W, from ONNX Gemm and MatMul. The one op that the
// planner plans.
#pragma once

#include "engine/graph/op.h"
#include "kernels/base/activation.h"

namespace espalier::graph {

// Inputs of the step: x [items · tokens_per_item, in], then the bias [out] and the residual [items · tokens_per_item, out] where
// there are such, in any order.
class LinearOp : public Op {
 public:
  LinearOp(int weight, int64_t out, int64_t in, int64_t tokens_per_item)
      : weight_(weight), out_(out), in_(in), tokens_per_item_(tokens_per_item) {}

  kernels::KernelStatus Run(const RunContext& context, const Step& step) const override;

  // y may lie in the residual's memory (kernels/linear/linear.h).
  int in_place_input() const override { return residual_input_; }

  // What Run passes to the kernel.
  kernels::LinearArgs Args(const RunContext& context, const Step& step) const;

  int layer() const { return layer_; }    // index into Program::linears and RunContext::linears
  int weight() const { return weight_; }  // index into Program::weights
  int64_t out() const { return out_; }
  int64_t in() const { return in_; }
  int64_t tokens_per_item() const { return tokens_per_item_; }
  kernels::Activation activation() const { return activation_; }
  // Which input of the step they are; −1: there is none.
  int bias_input() const { return bias_input_; }
  int residual_input() const { return residual_input_; }

  void set_layer(int layer) { layer_ = layer; }
  void set_activation(kernels::Activation activation) { activation_ = activation; }
  void set_bias_input(int input) { bias_input_ = input; }
  void set_residual_input(int input) { residual_input_ = input; }

 private:
  int layer_ = -1, bias_input_ = -1, residual_input_ = -1;
  const int weight_;
  const int64_t out_, in_, tokens_per_item_;
  kernels::Activation activation_ = kernels::Activation::kNone;
};

}  // namespace espalier::graph
