#include "engine/graph/linear_pairs.h"

#include <memory>
#include <utility>

#include "engine/graph/ops/linear.h"
#include "kernels/linear_pair/linear_pair.h"

namespace espalier::graph {
namespace {

// The second layer of a pair.
class PairedLinearOp final : public LinearOp {
 public:
  PairedLinearOp(const LinearOp& second, Step first) : LinearOp(second), first_(std::move(first)) {}

  kernels::KernelStatus Run(const RunContext& context, const Step& step) const override {
    if (!context.linears[layer()].paired) return LinearOp::Run(context, step);
    const auto& first = static_cast<const LinearOp&>(*first_.op);
    return kernels::RunLinearPair(context.kernel,
                                  {first.Args(context, first_), Args(context, step)});
  }

 private:
  const Step first_;
};

}  // namespace

std::vector<LinearPair> PairLinears(Program& program) {
  std::vector<int> readers(program.values.size(), 0);
  for (const Step& step : program.steps) {
    for (int value : step.inputs) ++readers[value];
  }
  std::vector<const Step*> open(program.values.size(), nullptr);  // layers that may be a first one
  std::vector<LinearPair> pairs;
  for (Step& step : program.steps) {
    const auto* linear = dynamic_cast<const LinearOp*>(step.op.get());
    if (linear == nullptr) continue;
    const int x = step.inputs[0];
    const Step* first = open[x];
    const bool alone = program.values[x].role == Value::Role::kActivation && readers[x] == 1;
    if (first == nullptr || !alone) {
      if (linear->residual_input() < 0) open[step.output] = &step;
      continue;
    }
    pairs.push_back({static_cast<const LinearOp&>(*first->op).layer(), linear->layer()});
    step.keeps = first->inputs;
    auto paired = std::make_shared<PairedLinearOp>(*linear, *first);
    program.linears[linear->layer()] = paired.get();
    step.op = std::move(paired);
  }
  return pairs;
}

}  // namespace espalier::graph
