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
    for (size_t i = 0; i < steps.size(); ++i) {
      if (FuseInto(steps[i])) {
        steps[i].op.reset();
      } else {
        producer_[steps[i].output] = static_cast<int>(i);
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

  bool FuseInto(const Step& step) {
    if (const auto* activation = dynamic_cast<const ActivationOp*>(step.op.get())) {
      Step* linear = OpenLinearOrNull(step.inputs[0]);
      if (linear == nullptr) return false;
      static_cast<LinearOp*>(linear->op.get())->set_activation(activation->activation());
      Redirect(*linear, step.output);
      return true;
    }
    const auto* sum = dynamic_cast<const BroadcastOp*>(step.op.get());
    if (sum == nullptr || sum->op() != kernels::BinaryOp::kAdd || sum->row_constant() < 0)
      return false;
    Step* linear = OpenLinearOrNull(step.inputs[1 - sum->row_constant()]);
    if (linear == nullptr || linear->inputs.size() > 1) return false;
    const int bias = BiasOrNegative(step.inputs[sum->row_constant()],
                                    static_cast<LinearOp*>(linear->op.get())->out());
    if (bias < 0) return false;
    linear->inputs.push_back(bias);
    Redirect(*linear, step.output);
    return true;
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
