// Softmax and LayerNormalization: ops that reduce along axes of an item.
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/graph/lowering.h"
#include "kernels/layer_norm/layer_norm.h"
#include "kernels/softmax/softmax.h"

namespace espalier::graph {
namespace {

class SoftmaxOp final : public Op {
 public:
  SoftmaxOp(int64_t outer_per_item, int64_t n, int64_t inner)
      : outer_per_item_(outer_per_item), n_(n), inner_(inner) {}
  kernels::KernelStatus Run(const RunContext& context, const Step& step) const override {
    return kernels::Softmax(context.kernel, {step.In<void>(context, 0), step.Out<void>(context),
                                             outer_per_item_ * context.batch, n_, inner_,
                                             context.forms[step.output].storage});
  }
  int in_place_input() const override { return 0; }

 private:
  const int64_t outer_per_item_, n_, inner_;
};

// Inputs of the step: x, scale, and the bias when there is one.
class LayerNormOp final : public Op {
 public:
  LayerNormOp(int64_t rows_per_item, int64_t n, float epsilon)
      : rows_per_item_(rows_per_item), n_(n), epsilon_(epsilon) {}
  kernels::KernelStatus Run(const RunContext& context, const Step& step) const override {
    kernels::LayerNormArgs args;
    args.x = step.In<void>(context, 0);
    args.dtype = context.forms[step.output].storage;
    args.scale = step.In<float>(context, 1);
    args.bias = step.inputs.size() > 2 ? step.In<float>(context, 2) : nullptr;
    args.y = step.Out<void>(context);
    args.rows = rows_per_item_ * context.batch;
    args.n = n_;
    args.epsilon = epsilon_;
    return kernels::LayerNorm(context.kernel, args);
  }
  int in_place_input() const override { return 0; }

 private:
  const int64_t rows_per_item_, n_;
  const float epsilon_;
};

int64_t Product(const Shape& shape, int64_t begin, int64_t end) {
  int64_t product = 1;
  for (int64_t i = begin; i < end; ++i) product *= shape[i] == kBatch ? 1 : shape[i];
  return product;
}

// Softmax over axes [first, last] of x, which are neighbours.
absl::Status EmitSoftmax(Lowering& lowering, const Operand& x, int64_t first, int64_t last) {
  if (lowering.batched() && first == 0) {
    return lowering.Unimplemented(absl::StrCat("softmax along axis 0 of ", ToString(x.shape),
                                               " mixes the items of a batch: ", kRunAsItIs));
  }
  const int64_t n = Product(x.shape, first, last + 1);
  if (n == 0)
    return lowering.Invalid(absl::StrCat("softmax over no elements of ", ToString(x.shape)));
  return lowering.EmitOutput(std::make_unique<SoftmaxOp>(Product(x.shape, 0, first), n,
                                                         Product(x.shape, last + 1, x.rank())),
                             {x.value}, x.dtype, x.shape);
}

// A scale or bias as n values: the parameter itself, or broadcast to the normalised axes.
absl::StatusOr<int> NormParameter(Lowering& lowering, const Operand& parameter,
                                  const Shape& normalised) {
  if (!parameter.is_constant()) {
    return lowering.Unimplemented(absl::StrCat("'", parameter.name,
                                               "' is computed at run time; scale and bias must be "
                                               "constants"));
  }
  if (parameter.rank() > static_cast<int>(normalised.size())) {
    return lowering.Unimplemented(
        absl::StrCat("'", parameter.name, "' has shape ", ToString(parameter.shape),
                     "; at most the normalised ", ToString(normalised), " is supported"));
  }
  const size_t offset = normalised.size() - parameter.shape.size();
  for (size_t i = 0; i < parameter.shape.size(); ++i) {
    if (parameter.shape[i] == 1 || parameter.shape[i] == normalised[offset + i]) continue;
    return lowering.Invalid(absl::StrCat("'", parameter.name, "' of shape ",
                                         ToString(parameter.shape), " does not broadcast to ",
                                         ToString(normalised)));
  }
  auto elements = ElementCount(normalised);
  if (!elements.ok()) return elements.status();
  if (parameter.constant->elements() == *elements) return lowering.ValueOf(parameter);

  auto source = Convert(parameter.constant->view(), DType::kFloat32);
  if (!source.ok()) return source.status();
  auto expanded = Tensor::Allocate(DType::kFloat32, normalised);
  if (!expanded.ok()) return expanded.status();
  for (int64_t i = 0; i < *elements; ++i) {
    int64_t rest = i, index = 0, stride = 1;
    for (int axis = static_cast<int>(normalised.size()) - 1; axis >= static_cast<int>(offset);
         --axis) {
      const int64_t dim = parameter.shape[axis - offset];
      if (dim != 1) index += rest % normalised[axis] * stride;
      rest /= normalised[axis];
      stride *= dim;
    }
    expanded->As<float>()[i] = source->As<float>()[index];
  }
  Operand operand = parameter;
  operand.shape = normalised;
  operand.constant = std::make_shared<const Tensor>(*std::move(expanded));
  return lowering.ValueOf(operand);
}

}  // namespace

absl::Status LowerSoftmax(Lowering& lowering) {
  auto attribute = lowering.IntAttribute("axis", -1);
  if (!attribute.ok()) return attribute.status();
  auto x = lowering.FloatInput(0);
  if (!x.ok()) return x.status();
  auto axis = lowering.Axis(*attribute, (*x)->rank());
  if (!axis.ok()) return axis.status();
  return EmitSoftmax(lowering, **x, *axis, *axis);
}

// Before opset 13 the input is flattened to a matrix at `axis` and its rows are normalised.
absl::Status LowerFlattenedSoftmax(Lowering& lowering) {
  auto attribute = lowering.IntAttribute("axis", 1);
  if (!attribute.ok()) return attribute.status();
  auto x = lowering.FloatInput(0);
  if (!x.ok()) return x.status();
  auto axis = lowering.Axis(*attribute, (*x)->rank());
  if (!axis.ok()) return axis.status();
  return EmitSoftmax(lowering, **x, *axis, (*x)->rank() - 1);
}

absl::Status LowerLayerNormalization(Lowering& lowering) {
  auto attribute = lowering.IntAttribute("axis", -1);
  if (!attribute.ok()) return attribute.status();
  auto epsilon = lowering.FloatAttribute("epsilon", 1e-5f);
  if (!epsilon.ok()) return epsilon.status();
  auto stash = lowering.IntAttribute("stash_type", 1);
  if (!stash.ok()) return stash.status();
  if (*stash != 1) {
    return lowering.Unimplemented(
        absl::StrCat("stash_type ", *stash, " is not supported, only 1 (FP32)"));
  }
  if (absl::Status status = lowering.LimitOutputs(1); !status.ok()) return status;
  auto x = lowering.FloatInput(0);
  if (!x.ok()) return x.status();
  auto axis = lowering.Axis(*attribute, (*x)->rank());
  if (!axis.ok()) return axis.status();
  if (lowering.batched() && *axis == 0) {
    return lowering.Unimplemented(
        absl::StrCat("normalising ", ToString((*x)->shape),
                     " from axis 0 mixes the items of a batch: ", kRunAsItIs));
  }
  const Shape normalised((*x)->shape.begin() + *axis, (*x)->shape.end());
  const int64_t n = Product((*x)->shape, *axis, (*x)->rank());
  if (n == 0)
    return lowering.Invalid(absl::StrCat("normalising no elements of ", ToString((*x)->shape)));
  std::vector<int> inputs = {(*x)->value};
  for (int i = 1; i <= 2; ++i) {
    if (i == 2 && lowering.InputOrNull(i) == nullptr) break;
    auto parameter = lowering.FloatInput(i);
    if (!parameter.ok()) return parameter.status();
    auto value = NormParameter(lowering, **parameter, normalised);
    if (!value.ok()) return value.status();
    inputs.push_back(*value);
  }
  return lowering.EmitOutput(
      std::make_unique<LayerNormOp>(Product((*x)->shape, 0, *axis), n, *epsilon), std::move(inputs),
      (*x)->dtype, (*x)->shape);
}

}  // namespace espalier::graph
