#include "engine/graph/ops/linear.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/graph/lowering.h"
#include "engine/graph/ops/elementwise.h"
#include "engine/graph/ops/transpose.h"

namespace espalier::graph {

kernels::LinearArgs LinearOp::Args(const RunContext& context, const Step& step) const {
  const Value& x = context.forms[step.inputs[0]];
  const Value& y = context.forms[step.output];
  kernels::LinearArgs args;
  args.weight = context.linears[layer_].weight;
  args.io_dtype = x.storage;
  args.x = step.In<void>(context, 0);
  args.x_stride = x.width > 0 ? x.row_stride : in_;
  args.y = step.Out<void>(context);
  args.y_stride = y.width > 0 ? y.row_stride : out_;
  if (bias_input_ >= 0) args.bias = step.In<float>(context, bias_input_);
  if (residual_input_ >= 0) {
    const Value& residual = context.forms[step.inputs[residual_input_]];
    args.residual = step.In<void>(context, residual_input_);
    args.residual_stride = residual.width > 0 ? residual.row_stride : out_;
  }
  args.activation = activation_;
  args.tokens = context.batch * tokens_per_item_;
  args.scratch = context.scratch;
  return args;
}

kernels::KernelStatus LinearOp::Run(const RunContext& context, const Step& step) const {
  const LinearBinding& binding = context.linears[layer_];
  if (binding.paired) return {};  // the second layer's step runs both
  return binding.variant->run(context.kernel, Args(context, step));
}

namespace {

// Emits x · Wᵀ for W = `matrix` when it is stored as [out, in], or its transpose when stored as
// [in, out].
absl::StatusOr<Operand> EmitLinear(Lowering& lowering, const Operand& x, const Operand& matrix,
                                   bool stored_out_in, Shape shape) {
  if (matrix.shape[0] == 0 || matrix.shape[1] == 0) {
    return lowering.Invalid(
        absl::StrCat("weight '", matrix.name, "' of shape ", ToString(matrix.shape), " is empty"));
  }
  std::shared_ptr<const Tensor> weight = matrix.constant;
  if (!stored_out_in) {
    auto transposed = lowering.Transposed(matrix);
    if (!transposed.ok()) return transposed.status();
    weight = *std::move(transposed);
  }
  const int64_t out = weight->shape()[0], in = weight->shape()[1];
  const int index = lowering.AddWeight(matrix, std::move(weight));
  return lowering.Emit(
      std::make_unique<LinearOp>(index, out, in, lowering.ItemElements(x.shape) / in), {x.value},
      x.dtype, shape);
}

// factor · constant, held in f32 whatever its type, so that it is rounded once.
absl::StatusOr<Operand> Scaled(const Operand& operand, float factor) {
  auto tensor = Convert(operand.constant->view(), DType::kFloat32);
  if (!tensor.ok()) return tensor.status();
  for (int64_t i = 0; i < tensor->elements(); ++i) tensor->As<float>()[i] *= factor;
  Operand scaled = operand;
  scaled.constant = std::make_shared<const Tensor>(*std::move(tensor));
  return scaled;
}

absl::StatusOr<Operand> ScalarConstant(const std::string& name, DType dtype, float value) {
  auto tensor = Tensor::Allocate(DType::kFloat32, {});
  if (!tensor.ok()) return tensor.status();
  *tensor->As<float>() = value;
  Operand scalar;
  scalar.name = name;
  scalar.dtype = dtype;
  scalar.constant = std::make_shared<const Tensor>(*std::move(tensor));
  return scalar;
}

absl::Status CheckOperands(const Lowering& lowering, const Operand& x, const Operand& weight) {
  if (x.dtype != weight.dtype) {
    return lowering.Invalid(absl::StrCat("inputs '", x.name, "' and '", weight.name,
                                         "' have different types: ", NameOf(x.dtype), " and ",
                                         NameOf(weight.dtype)));
  }
  if (!weight.is_constant()) {
    return lowering.Unimplemented(
        x.is_constant() ? absl::StrCat("the weight '", x.name,
                                       "' is on the left of a value; Espalier multiplies [.., in] "
                                       "by a constant [in, out]: export the transposed product")
                        : "both operands are computed at run time; Espalier multiplies by constant "
                          "weights only");
  }
  return absl::OkStatus();
}

// product + beta · C.
absl::StatusOr<Operand> AddC(Lowering& lowering, const Operand& product, const Operand& c,
                             float beta) {
  absl::StatusOr<Operand> term = c;
  if (beta != 1.0f && c.is_constant()) {
    term = Scaled(c, beta);
  } else if (beta != 1.0f) {
    auto factor = ScalarConstant("beta", c.dtype, beta);
    if (!factor.ok()) return factor;
    term = EmitBroadcast(lowering, kernels::BinaryOp::kMul, c, *factor);
  }
  if (!term.ok()) return term;
  auto sum = EmitBroadcast(lowering, kernels::BinaryOp::kAdd, product, *term);
  if (sum.ok() && sum->shape != product.shape) {
    return lowering.Invalid(absl::StrCat("C of shape ", ToString(c.shape),
                                         " does not broadcast to ", ToString(product.shape)));
  }
  return sum;
}

}  // namespace

absl::Status LowerGemm(Lowering& lowering) {
  auto alpha = lowering.FloatAttribute("alpha", 1.0f);
  if (!alpha.ok()) return alpha.status();
  auto beta = lowering.FloatAttribute("beta", 1.0f);
  if (!beta.ok()) return beta.status();
  auto trans_a = lowering.IntAttribute("transA", 0);
  if (!trans_a.ok()) return trans_a.status();
  auto trans_b = lowering.IntAttribute("transB", 0);
  if (!trans_b.ok()) return trans_b.status();
  auto a = lowering.FloatInput(0);
  if (!a.ok()) return a.status();
  auto b = lowering.FloatInput(1);
  if (!b.ok()) return b.status();
  if ((*a)->rank() != 2 || (*b)->rank() != 2) {
    return lowering.Invalid(absl::StrCat("A and B must be matrices, got ", ToString((*a)->shape),
                                         " and ", ToString((*b)->shape)));
  }
  if (absl::Status status = CheckOperands(lowering, **a, **b); !status.ok()) return status;
  Operand x = **a, matrix = **b;
  if (*trans_a != 0) {
    auto transposed = EmitTranspose(lowering, x, {1, 0});
    if (!transposed.ok()) return transposed.status();
    x = *std::move(transposed);
  }
  const int64_t in = matrix.shape[*trans_b ? 1 : 0], out = matrix.shape[*trans_b ? 0 : 1];
  if (x.shape[1] != in) {
    return lowering.Invalid(absl::StrCat(
        "A", *trans_a ? "ᵀ" : "", " is ", ToString(x.shape), " and B", *trans_b ? "ᵀ" : "", " is ",
        ToString(Shape{in, out}), ": the inner dimensions differ"));
  }
  if (*alpha != 1.0f) {
    auto scaled = Scaled(matrix, *alpha);
    if (!scaled.ok()) return scaled.status();
    matrix = *std::move(scaled);
  }
  auto product = EmitLinear(lowering, x, matrix, *trans_b != 0, {x.shape[0], out});
  if (!product.ok()) return product.status();
  if (const Operand* c = lowering.InputOrNull(2); c != nullptr && *beta != 0.0f) {
    product = AddC(lowering, *product, *c, *beta);
    if (!product.ok()) return product.status();
  }
  lowering.Define(0, *std::move(product));
  return absl::OkStatus();
}

absl::Status LowerMatMul(Lowering& lowering) {
  auto a = lowering.FloatInput(0);
  if (!a.ok()) return a.status();
  auto b = lowering.FloatInput(1);
  if (!b.ok()) return b.status();
  if (absl::Status status = CheckOperands(lowering, **a, **b); !status.ok()) return status;
  const Operand x = **a;
  Operand matrix = **b;
  if (matrix.rank() != 1 && matrix.rank() != 2) {
    return lowering.Unimplemented(
        absl::StrCat("the weight '", matrix.name, "' has shape ", ToString(matrix.shape),
                     "; only [in, out] and [in] are supported: split the product"));
  }
  const int64_t in = matrix.shape[0];
  if (x.rank() < 1 || x.shape.back() != in) {
    return lowering.Invalid(absl::StrCat("inputs of shape ", ToString(x.shape), " and ",
                                         ToString(matrix.shape), ": the inner dimensions differ"));
  }
  // A vector on the right is a matrix with one column, and that dimension goes from the result.
  Shape shape = x.shape;
  const bool vector = matrix.rank() == 1;
  if (vector) {
    shape.pop_back();
    matrix.shape = {1, in};
    auto row = Tensor::Allocate(matrix.dtype, matrix.shape);
    if (!row.ok()) return row.status();
    std::memcpy(row->data(), matrix.constant->data(), row->bytes());
    matrix.constant = std::make_shared<const Tensor>(*std::move(row));
  } else {
    shape.back() = matrix.shape[1];
  }
  auto product = EmitLinear(lowering, x, matrix, vector, shape);
  if (!product.ok()) return product.status();
  lowering.Define(0, *std::move(product));
  return absl::OkStatus();
}

}  // namespace espalier::graph
