#include "engine/graph/device_forms.h"

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "engine/graph/ops/cast.h"
#include "engine/graph/ops/elementwise.h"
#include "engine/graph/ops/linear.h"

namespace espalier::graph {
namespace {

constexpr int64_t kMixed = -1;  // used with several widths, or by a step that knows no rows

const LinearOp* AsLinear(const Step& step) { return dynamic_cast<const LinearOp*>(step.op.get()); }
bool IsCast(const Step& step) { return dynamic_cast<const CastOp*>(step.op.get()) != nullptr; }

class FormPlanner {
 public:
  FormPlanner(Program& program, DType compute) : program_(program), compute_(compute) {}

  void Run() {
    for (Value& value : program_.values) {
      if (value.role == Value::Role::kActivation && value.storage == DType::kFloat32)
        value.storage = compute_;
    }
    ChooseRows();
    std::vector<Step> steps = std::move(program_.steps);
    program_.steps.clear();
    for (Step& step : steps) Adapt(std::move(step));
  }

 private:
  // The width of the rows that input i of a linear layer lies in; 0 for its bias.
  static int64_t RowWidth(const LinearOp& linear, int i) {
    return i == 0 ? linear.in() : i == linear.residual_input() ? linear.out() : 0;
  }

  // Rows where all neighbours are linear layers of one width, or conversions.
  void ChooseRows() {
    std::vector<int64_t> width(program_.values.size(), 0);
    const auto meet = [&](int value, int64_t wanted) {
      width[value] = width[value] == 0 || width[value] == wanted ? wanted : kMixed;
    };
    for (const Step& step : program_.steps) {
      const LinearOp* linear = AsLinear(step);
      if (IsCast(step)) continue;
      for (size_t i = 0; i < step.inputs.size(); ++i) {
        const int64_t wanted = linear == nullptr ? 0 : RowWidth(*linear, static_cast<int>(i));
        meet(step.inputs[i], wanted > 0 ? wanted : kMixed);
      }
      meet(step.output, linear != nullptr ? linear->out() : kMixed);
    }
    for (const Step& step : program_.steps) {  // a conversion knows one width at a time
      if (!IsCast(step)) continue;
      const int64_t from = width[step.inputs[0]];
      if (from > 0 && width[step.output] > 0 && width[step.output] != from)
        width[step.output] = kMixed;
    }
    for (size_t i = 0; i < width.size(); ++i) {
      Value& value = program_.values[i];
      if (value.role == Value::Role::kActivation && width[i] > 0) SetRows(value, width[i]);
    }
  }

  static void SetRows(Value& value, int64_t width) {
    value.width = width;
    value.row_stride = RowStrideOf(width);
  }

  bool Fits(int value, int64_t width) const {
    const Value& form = program_.values[value];
    if (form.storage != compute_) return false;
    return width == 0 || form.width > 0 || width % 8 == 0;
  }

  // An activation of `like`'s size in a form that fits.
  int NewValue(int like, int64_t width) {
    Value value;
    value.name = program_.values[like].name;
    value.storage = compute_;
    value.elements = program_.values[like].elements;
    if (width > 0) SetRows(value, width);
    program_.values.push_back(std::move(value));
    return static_cast<int>(program_.values.size()) - 1;
  }

  void Convert(const Step& neighbour, int from, int to) {
    Step step;
    step.node = neighbour.node;
    step.op_type = "form";
    step.inputs = {from};
    step.output = to;
    const DType from_type = program_.values[from].storage, to_type = program_.values[to].storage;
    step.op = std::make_unique<CastOp>(from_type, to_type, to_type, program_.values[from].elements);
    program_.steps.push_back(std::move(step));
  }

  // Input i of the step in a form that fits, converted where it is in another: once for all that read it so.
  void AdaptInput(Step& step, int i, int64_t width) {
    const int from = step.inputs[i];
    if (program_.values[from].role == Value::Role::kConstant || Fits(from, width)) return;
    const auto [converted, is_new] = converted_.try_emplace({from, width}, 0);
    if (is_new) {
      converted->second = NewValue(from, width);
      Convert(step, from, converted->second);
    }
    step.inputs[i] = converted->second;
  }

  // Whether a step computes with floats and needs them in the compute type.
  bool Computes(const Step& step) const {
    if (IsCast(step) || dynamic_cast<const BroadcastOp*>(step.op.get()) != nullptr) return false;
    return program_.values[step.output].storage == compute_ ||
           program_.values[step.output].storage == DType::kFloat32;
  }

  void Adapt(Step step) {
    if (!Computes(step)) {
      program_.steps.push_back(std::move(step));
      return;
    }
    const LinearOp* linear = AsLinear(step);
    const int64_t out = linear != nullptr ? linear->out() : 0;
    const int y = step.output;
    AdaptInput(step, 0, linear != nullptr ? linear->in() : 0);
    if (linear != nullptr && linear->residual_input() > 0)
      AdaptInput(step, linear->residual_input(), out);
    const bool converts = !Fits(y, out);
    if (converts) step.output = NewValue(y, out);
    program_.steps.push_back(std::move(step));
    if (converts) {
      const Step& made = program_.steps.back();
      Convert(made, made.output, y);
    }
  }

  Program& program_;
  const DType compute_;
  std::map<std::pair<int, int64_t>, int> converted_;  // (value, width of its rows): its other form
};

}  // namespace

void PrepareForDevice(Program& program, DType compute) { FormPlanner(program, compute).Run(); }

}  // namespace espalier::graph
