#include "engine/graph/ops/transpose.h"

#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/transpose/transpose.h"

namespace espalier::graph {
namespace {

class TransposeOp final : public Op {
 public:
  // `args` describes one item, its first dimension and stride those of the items.
  explicit TransposeOp(const kernels::TransposeArgs& args) : args_(args) {}

  kernels::KernelStatus Run(const RunContext& context, const Step& step) const override {
    kernels::TransposeArgs args = args_;
    args.dims[0] *= context.batch;
    args.element_bytes = SizeOf(context.forms[step.output].storage);
    args.x = step.In<void>(context, 0);
    args.y = step.Out<void>(context);
    return kernels::Transpose(context.kernel, args);
  }

 private:
  const kernels::TransposeArgs args_;
};

// Whether the axes longer than one keep their order, so that memory stays as it is.
bool KeepsOrder(const Shape& shape, const std::vector<int64_t>& perm) {
  int64_t last = -1;
  for (int64_t axis : perm) {
    if (shape[axis] == 1) continue;
    if (axis < last) return false;
    last = axis;
  }
  return true;
}

}  // namespace

absl::StatusOr<Operand> EmitTranspose(Lowering& lowering, const Operand& x,
                                      const std::vector<int64_t>& perm) {
  if (lowering.batched() && (perm.empty() || perm[0] != 0)) {
    return lowering.Unimplemented(absl::StrCat("transposing ", ToString(x.shape),
                                               " moves the batch dimension: keep axis 0 first, or ",
                                               kRunAsItIs));
  }
  if (x.rank() > kernels::kMaxTransposeRank) {
    return lowering.Unimplemented(
        absl::StrCat("rank ", x.rank(), " is above ", kernels::kMaxTransposeRank));
  }
  Shape strides(x.shape.size());
  int64_t stride = 1;
  for (int axis = x.rank() - 1; axis >= 0; --axis) {
    strides[axis] = stride;
    stride *= x.shape[axis] == kBatch ? 1 : x.shape[axis];
  }
  kernels::TransposeArgs args;
  args.element_bytes = SizeOf(StorageOf(x.dtype));
  args.rank = x.rank();
  Shape shape(perm.size());
  for (size_t i = 0; i < perm.size(); ++i) {
    shape[i] = x.shape[perm[i]];
    args.dims[i] = shape[i] == kBatch ? 1 : shape[i];
    args.strides[i] = strides[perm[i]];
  }
  if (KeepsOrder(x.shape, perm)) {
    Operand same = x;
    same.shape = shape;
    return same;
  }
  return lowering.Emit(std::make_unique<TransposeOp>(args), {x.value}, x.dtype, shape);
}

absl::StatusOr<Tensor> TransposedMatrix(const Tensor& matrix) {
  const int64_t rows = matrix.shape()[0], cols = matrix.shape()[1];
  auto tensor = Tensor::Allocate(matrix.dtype(), {cols, rows});
  if (!tensor.ok()) return tensor;
  kernels::TransposeArgs args;
  args.element_bytes = SizeOf(tensor->dtype());
  args.rank = 2;
  args.dims[0] = cols;
  args.dims[1] = rows;
  args.strides[0] = 1;
  args.strides[1] = cols;
  args.x = matrix.data();
  args.y = tensor->data();
  const kernels::KernelStatus status = kernels::Transpose({}, args);
  if (!status.ok()) return absl::InternalError(status.message);
  return tensor;
}

absl::Status LowerTranspose(Lowering& lowering) {
  auto attribute = lowering.IntsAttribute("perm");
  if (!attribute.ok()) return attribute.status();
  auto x = lowering.Input(0);
  if (!x.ok()) return x.status();
  std::vector<int64_t> perm = *std::move(attribute);
  if (!lowering.HasAttribute("perm")) {
    perm.resize((*x)->rank());
    std::iota(perm.rbegin(), perm.rend(), 0);
  }
  std::vector<bool> seen((*x)->rank());
  for (int64_t axis : perm) {
    if (axis < 0 || axis >= (*x)->rank() || seen[axis]) {
      return lowering.Invalid(absl::StrCat(
          "perm ", ToString(perm), " is no permutation of the axes of ", ToString((*x)->shape)));
    }
    seen[axis] = true;
  }
  if (static_cast<int>(perm.size()) != (*x)->rank()) {
    return lowering.Invalid(absl::StrCat("perm ", ToString(perm), " has ", perm.size(),
                                         " axes, expected ", (*x)->rank()));
  }
  auto result = EmitTranspose(lowering, **x, perm);
  if (!result.ok()) return result.status();
  lowering.Define(0, *std::move(result));
  return absl::OkStatus();
}

}  // namespace espalier::graph
