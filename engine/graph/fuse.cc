#include "engine/graph/fuse.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "engine/graph/ops/elementwise.h"
#include "engine/graph/ops/linear.h"

namespace espalier::graph {
namespace {

class EpilogueFuser {
 public:
  explicit EpilogueFuser(Program& program)
      : program_(program), uses_(program.values.size(), 0), producer_(program.values.size(), -1) {
    for (const Step& step : program.steps) {
      for (int value : step.inputs) ++uses_[value];
    }
  }

  void Run() {
    std::vector<Step>& steps = program_.steps;
    for (int i = 0; i < static_cast<int>(steps.size()); ++i) {
      if (FuseActivation(steps[i]) || FuseBias(steps[i]) || FuseResidual(steps[i])) {
        steps[i].op.reset();
      } else if (!MoveAndFuseResidual(i)) {
        producer_[steps[i].output] = i;
      }
    }
    std::erase_if(steps, [](const Step& step) { return step.op == nullptr; });
  }

 private:
  // The linear step that makes `value` for one consumer only and has no activation yet; null
  // otherwise.
  Step* OpenLinearOrNull(int value) {
    if (program_.values[value].role != Value::Role::kActivation || uses_[value] != 1 ||
        producer_[value] < 0) {
      return nullptr;
    }
    Step& step = program_.steps[producer_[value]];
    const auto* linear = dynamic_cast<const LinearOp*>(step.op.get());
    return linear != nullptr && linear->activation() == kernels::Activation::kNone ? &step
                                                                                   : nullptr;
  }

  static LinearOp& OpOf(Step& linear) { return static_cast<LinearOp&>(*linear.op); }

  bool FuseActivation(const Step& step) {
    const auto* activation = dynamic_cast<const ActivationOp*>(step.op.get());
    if (activation == nullptr) return false;
    Step* linear = OpenLinearOrNull(step.inputs[0]);
    if (linear == nullptr) return false;
    OpOf(*linear).set_activation(activation->activation());
    Redirect(*linear, step.output);
    return true;
  }

  static const BroadcastOp* SumOrNull(const Step& step) {
    const auto* sum = dynamic_cast<const BroadcastOp*>(step.op.get());
    return sum != nullptr && sum->op() == kernels::BinaryOp::kAdd ? sum : nullptr;
  }

  bool FuseBias(const Step& step) {
    const BroadcastOp* sum = SumOrNull(step);
    if (sum == nullptr || sum->row_constant() < 0) return false;
    Step* linear = OpenLinearOrNull(step.inputs[1 - sum->row_constant()]);
    if (linear == nullptr || OpOf(*linear).bias_input() >= 0) return false;
    const int bias = BiasOrNegative(step.inputs[sum->row_constant()], OpOf(*linear).out());
    if (bias < 0) return false;
    OpOf(*linear).set_bias_input(static_cast<int>(linear->inputs.size()));
    linear->inputs.push_back(bias);
    Redirect(*linear, step.output);
    return true;
  }

  // The linear step that `step`, a sum, adds another value of the same shape to, on `side`, and that may take it as its
  // residual; null otherwise. (The other does not depend on the linear layer, whose value has no second reader.)
  Step* LinearOfSumOrNull(const Step& step, int side) {
    const int value = step.inputs[side], other = step.inputs[1 - side];
    const auto fits = [&](int of) {
      return program_.values[of].elements == program_.values[step.output].elements &&
             program_.values[of].storage == DType::kFloat32;
    };
    // A constant is of another type than the activations on a GPU.
    if (!fits(value) || !fits(other) || program_.values[other].role == Value::Role::kConstant) {
      return nullptr;
    }
    Step* linear = OpenLinearOrNull(value);
    return linear != nullptr && OpOf(*linear).residual_input() < 0 ? linear : nullptr;
  }

  static void AddResidual(Step& linear, int residual) {
    OpOf(linear).set_residual_input(static_cast<int>(linear.inputs.size()));
    linear.inputs.push_back(residual);
  }

  // The other value is there when the linear layer runs.
  bool FuseResidual(const Step& step) {
    if (SumOrNull(step) == nullptr) return false;
    for (const int side : {0, 1}) {
      Step* linear = LinearOfSumOrNull(step, side);
      const int other = step.inputs[1 - side];
      if (linear == nullptr || producer_[other] > producer_[step.inputs[side]]) continue;
      AddResidual(*linear, other);
      Redirect(*linear, step.output);
      return true;
    }
    return false;
  }

  // The other value comes later: the linear layer takes the place of step i, their sum.
  bool MoveAndFuseResidual(int i) {
    Step& sum = program_.steps[i];
    if (SumOrNull(sum) == nullptr) return false;
    for (const int side : {0, 1}) {
      Step* linear = LinearOfSumOrNull(sum, side);
      if (linear == nullptr) continue;
      AddResidual(*linear, sum.inputs[1 - side]);
      linear->output = sum.output;
      sum = std::move(*linear);
      linear->op.reset();
      producer_[sum.output] = i;
      return true;
    }
    return false;
  }

  // `constant` as one value per output: itself, or a scalar spread out; −1 when it is neither.
  int BiasOrNegative(int constant, int64_t out) {
    if (program_.values[constant].elements == out) return constant;
    if (program_.values[constant].elements != 1) return -1;
    auto tensor = Tensor::Allocate(DType::kFloat32, {out});
    if (!tensor.ok()) return -1;
    std::fill_n(tensor->As<float>(), out, *program_.values[constant].constant->As<float>());
    Value bias = program_.values[constant];
    bias.elements = out;
    bias.constant = std::make_shared<const Tensor>(*std::move(tensor));
    program_.values.push_back(std::move(bias));
    uses_.push_back(1);
    producer_.push_back(-1);
    return static_cast<int>(program_.values.size()) - 1;
  }

  void Redirect(Step& linear, int output) {
    producer_[output] = static_cast<int>(&linear - program_.steps.data());
    linear.output = output;
  }

  Program& program_;
  std::vector<int> uses_;      // by steps
  std::vector<int> producer_;  // step of every value so far
};

}  // namespace

void FuseLinearEpilogues(Program& program) { EpilogueFuser(program).Run(); }

}  // namespace espalier::graph
