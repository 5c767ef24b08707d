#include "engine/graph/ops/elementwise.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace espalier::graph {

kernels::KernelStatus BroadcastOp::Run(const RunContext& context, const Step& step) const {
  kernels::BinaryArgs args = args_;
  args.dims[0] *= context.batch;
  args.a = step.In<void>(context, 0);
  args.b = step.In<void>(context, 1);
  args.y = step.Out<void>(context);
  args.a_dtype = context.forms[step.inputs[0]].storage;
  args.b_dtype = context.forms[step.inputs[1]].storage;
  args.y_dtype = context.forms[step.output].storage;
  return kernels::Binary(context.kernel, args);
}

kernels::KernelStatus ActivationOp::Run(const RunContext& context, const Step& step) const {
  return kernels::Activate(context.kernel,
                           {activation_, step.In<void>(context, 0), step.Out<void>(context),
                            item_elements_ * context.batch, context.forms[step.output].storage});
}

namespace {

// The shape both operands broadcast to. With batching, every runtime operand has the batch as its
// first dimension, and the result must have it there too.
absl::StatusOr<Shape> BroadcastShape(const Lowering& lowering, const Operand& a, const Operand& b) {
  const int rank = std::max(a.rank(), b.rank());
  Shape shape(rank, 1);
  for (const Operand* operand : {&a, &b}) {
    const int offset = rank - operand->rank();
    if (lowering.batched() && !operand->is_constant() && offset > 0) {
      return lowering.Unimplemented(
          absl::StrCat("broadcasting ", ToString(a.shape), " with ", ToString(b.shape),
                       " moves the batch dimension of '", operand->name, "': reshape it to ", rank,
                       " dimensions first, or ", kRunAsItIs));
    }
    for (int i = 0; i < operand->rank(); ++i) {
      const int64_t dim = operand->shape[i];
      int64_t& target = shape[offset + i];
      if (dim == target || dim == 1) continue;
      if (target == 1) {
        target = dim;
      } else if (dim == kBatch || target == kBatch) {
        return lowering.Unimplemented(
            absl::StrCat("a constant with ", std::max(dim, target),
                         " rows along the batch dimension mixes the items of a batch (",
                         ToString(a.shape), " and ", ToString(b.shape), "): ", kRunAsItIs));
      } else {
        return lowering.Invalid(absl::StrCat("shapes ", ToString(a.shape), " and ",
                                             ToString(b.shape), " do not broadcast"));
      }
    }
  }
  return shape;
}

// Strides of a contiguous operand along the axes of `shape`, 0 where it is broadcast.
Shape BroadcastStrides(const Operand& operand, const Shape& shape) {
  Shape strides(shape.size(), 0);
  const size_t offset = shape.size() - operand.shape.size();
  int64_t stride = 1;
  for (int i = operand.rank() - 1; i >= 0; --i) {
    const int64_t dim = operand.shape[i];
    if (dim != 1) strides[offset + i] = stride;
    stride *= dim == kBatch ? 1 : dim;
  }
  return strides;
}

// A constant that has one value per element of the last dimension of `shape`, or one value for all.
bool IsRowConstant(const Operand& operand, const Operand& other, const Shape& shape) {
  if (!operand.is_constant() || other.shape != shape) return false;
  const int64_t elements = operand.constant->elements();
  return elements == 1 || (elements == shape.back() && operand.shape.back() == elements);
}

absl::Status LowerBinary(Lowering& lowering, kernels::BinaryOp op) {
  auto a = lowering.FloatInput(0);
  if (!a.ok()) return a.status();
  auto b = lowering.FloatInput(1);
  if (!b.ok()) return b.status();
  auto result = EmitBroadcast(lowering, op, **a, **b);
  if (!result.ok()) return result.status();
  lowering.Define(0, *std::move(result));
  return absl::OkStatus();
}

absl::Status LowerActivation(Lowering& lowering, kernels::Activation activation) {
  auto x = lowering.FloatInput(0);
  if (!x.ok()) return x.status();
  return lowering.EmitOutput(
      std::make_unique<ActivationOp>(activation, lowering.ItemElements((*x)->shape)), {(*x)->value},
      (*x)->dtype, (*x)->shape);
}

}  // namespace

absl::StatusOr<Operand> EmitBroadcast(Lowering& lowering, kernels::BinaryOp op, const Operand& a,
                                      const Operand& b) {
  if (a.dtype != b.dtype) {
    return lowering.Invalid(absl::StrCat("inputs '", a.name, "' and '", b.name,
                                         "' have different types: ", NameOf(a.dtype), " and ",
                                         NameOf(b.dtype)));
  }
  auto shape = BroadcastShape(lowering, a, b);
  if (!shape.ok()) return shape.status();
  const Shape a_strides = BroadcastStrides(a, *shape), b_strides = BroadcastStrides(b, *shape);
  // Axes that are one walk through both operands become one; the first axis stays the first, since
  // a batch multiplies it.
  kernels::BinaryArgs args;
  args.op = op;
  args.rank = 0;
  for (size_t i = 0; i < shape->size() || args.rank == 0; ++i) {
    const int64_t dim = shape->empty() ? 1 : (*shape)[i] == kBatch ? 1 : (*shape)[i];
    const int64_t a_stride = shape->empty() ? 1 : a_strides[i],
                  b_stride = shape->empty() ? 1 : b_strides[i];
    const int last = args.rank - 1;
    if (i > 0 && dim == 1) continue;
    if (i > 0 && args.a_strides[last] == a_stride * dim && args.b_strides[last] == b_stride * dim) {
      args.dims[last] *= dim;
      args.a_strides[last] = a_stride;
      args.b_strides[last] = b_stride;
      continue;
    }
    if (args.rank == kernels::kMaxBroadcastRank) {
      return lowering.Unimplemented(absl::StrCat("broadcasting ", ToString(a.shape), " with ",
                                                 ToString(b.shape), " takes more than ",
                                                 kernels::kMaxBroadcastRank, " loops"));
    }
    args.dims[args.rank] = dim;
    args.a_strides[args.rank] = a_stride;
    args.b_strides[args.rank++] = b_stride;
  }
  auto a_value = lowering.ValueOf(a);
  if (!a_value.ok()) return a_value.status();
  auto b_value = lowering.ValueOf(b);
  if (!b_value.ok()) return b_value.status();
  const int row_constant = IsRowConstant(b, a, *shape) ? 1 : IsRowConstant(a, b, *shape) ? 0 : -1;
  return lowering.Emit(std::make_unique<BroadcastOp>(args, row_constant, a.shape == *shape),
                       {*a_value, *b_value}, a.dtype, *shape);
}

absl::Status LowerAdd(Lowering& lowering) { return LowerBinary(lowering, kernels::BinaryOp::kAdd); }
absl::Status LowerSub(Lowering& lowering) { return LowerBinary(lowering, kernels::BinaryOp::kSub); }
absl::Status LowerMul(Lowering& lowering) { return LowerBinary(lowering, kernels::BinaryOp::kMul); }
absl::Status LowerDiv(Lowering& lowering) { return LowerBinary(lowering, kernels::BinaryOp::kDiv); }

absl::Status LowerRelu(Lowering& lowering) {
  return LowerActivation(lowering, kernels::Activation::kRelu);
}
absl::Status LowerSigmoid(Lowering& lowering) {
  return LowerActivation(lowering, kernels::Activation::kSigmoid);
}
absl::Status LowerTanh(Lowering& lowering) {
  return LowerActivation(lowering, kernels::Activation::kTanh);
}

absl::Status LowerGelu(Lowering& lowering) {
  auto approximate = lowering.StringAttribute("approximate", "none");
  if (!approximate.ok()) return approximate.status();
  if (*approximate == "none") return LowerActivation(lowering, kernels::Activation::kGeluErf);
  if (*approximate == "tanh") return LowerActivation(lowering, kernels::Activation::kGeluTanh);
  return lowering.Invalid(
      absl::StrCat("attribute 'approximate' is '", *approximate, "', expected 'none' or 'tanh'"));
}

}  // namespace espalier::graph
