// Ops that give a value another shape or name and move no data: Reshape, Flatten, Identity,
// Dropout, and Constant.
#include <cstring>
#include <memory>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "engine/graph/lowering.h"

namespace espalier::graph {
namespace {

absl::Status DefineReshaped(Lowering& lowering, const Operand& x, Shape shape) {
  Operand same = x;
  same.shape = std::move(shape);
  lowering.Define(0, std::move(same));
  return absl::OkStatus();
}

absl::Status MixesItems(const Lowering& lowering, const Operand& x,
                        absl::Span<const int64_t> target) {
  return lowering.Unimplemented(
      absl::StrCat("reshaping ", ToString(x.shape), " to ", ToString(target),
                   " mixes the items of a batch: start the shape with 0 or "
                   "-1 and keep the elements of an item together, or ",
                   kRunAsItIs));
}

// ONNX Reshape: 0 copies the dimension of x (unless allowzero), one -1 is inferred.
absl::StatusOr<Shape> ReshapedShape(const Lowering& lowering, const Operand& x,
                                    absl::Span<const int64_t> target, bool allow_zero) {
  Shape shape(target.begin(), target.end());
  int inferred = -1;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 0 && !allow_zero) {
      if (static_cast<int>(i) >= x.rank()) {
        return lowering.Invalid(absl::StrCat("shape ", ToString(target), " copies dimension ", i,
                                             " of ", ToString(x.shape)));
      }
      shape[i] = x.shape[i];
      if (shape[i] == kBatch && i != 0) return MixesItems(lowering, x, target);
    } else if (shape[i] == -1) {
      if (inferred >= 0)
        return lowering.Invalid(absl::StrCat("shape ", ToString(target), " has more than one -1"));
      inferred = static_cast<int>(i);
    } else if (shape[i] < 0) {
      return lowering.Invalid(
          absl::StrCat("shape ", ToString(target), " has a negative dimension"));
    }
  }
  // What is known of the target, without its batch dimension and without the inferred one.
  Shape known = shape;
  const bool keeps_batch = lowering.batched() && !shape.empty() && target[0] == 0 && !allow_zero;
  if (keeps_batch) known[0] = 1;
  if (inferred >= 0) known[inferred] = 1;
  auto elements = ElementCount(known);
  if (!elements.ok()) return lowering.Invalid(elements.status().message());
  const int64_t expected = lowering.ItemElements(x.shape);
  if (lowering.batched() && !keeps_batch) {
    // The first dimension must be the inferred one, and come out as the batch.
    if (inferred != 0 || *elements != expected) return MixesItems(lowering, x, target);
    shape[0] = kBatch;
    return shape;
  }
  if (inferred >= 0) {
    if (*elements == 0 || expected % *elements != 0) {
      return lowering.Invalid(
          absl::StrCat("cannot reshape ", ToString(x.shape), " to ", ToString(target)));
    }
    shape[inferred] = expected / *elements;
  } else if (*elements != expected) {
    return lowering.Invalid(absl::StrCat("cannot reshape ", ToString(x.shape), " to ",
                                         ToString(target), ": ", expected, " elements against ",
                                         *elements));
  }
  return shape;
}

}  // namespace

absl::Status LowerReshape(Lowering& lowering) {
  auto allow_zero = lowering.IntAttribute("allowzero", 0);
  if (!allow_zero.ok()) return allow_zero.status();
  auto x = lowering.Input(0);
  if (!x.ok()) return x.status();
  auto target = lowering.Input(1);
  if (!target.ok()) return target.status();
  if (!(*target)->is_constant()) {
    return lowering.Unimplemented(absl::StrCat("the shape '", (*target)->name,
                                               "' is computed at run time: export with "
                                               "a constant shape (0 or -1 stands for the batch)"));
  }
  const Tensor& tensor = *(*target)->constant;
  if (tensor.dtype() != DType::kInt64 || tensor.shape().size() != 1) {
    return lowering.Invalid(absl::StrCat("the shape '", (*target)->name, "' is ",
                                         NameOf(tensor.dtype()), " ", ToString(tensor.shape()),
                                         ", expected a vector of INT64"));
  }
  auto shape =
      ReshapedShape(lowering, **x, absl::MakeConstSpan(tensor.As<int64_t>(), tensor.elements()),
                    *allow_zero != 0);
  if (!shape.ok()) return shape.status();
  return DefineReshaped(lowering, **x, *std::move(shape));
}

absl::Status LowerFlatten(Lowering& lowering) {
  auto attribute = lowering.IntAttribute("axis", 1);
  if (!attribute.ok()) return attribute.status();
  auto x = lowering.Input(0);
  if (!x.ok()) return x.status();
  const int64_t rank = (*x)->rank();
  if (*attribute < -rank || *attribute > rank) {
    return lowering.Invalid(
        absl::StrCat("axis ", *attribute, " is outside [", -rank, ", ", rank, "]"));
  }
  const int64_t axis = *attribute < 0 ? *attribute + rank : *attribute;
  Shape shape = {1, 1};
  for (int64_t i = 0; i < rank; ++i) {
    const int64_t dim = (*x)->shape[i];
    shape[i < axis ? 0 : 1] *= dim == kBatch ? 1 : dim;
  }
  if (lowering.batched()) {
    if (axis == 0 || shape[0] != 1) {
      return lowering.Unimplemented(absl::StrCat("flattening ", ToString((*x)->shape), " at axis ",
                                                 axis,
                                                 " mixes the "
                                                 "items of a batch: flatten at axis 1, or ",
                                                 kRunAsItIs));
    }
    shape[0] = kBatch;
  }
  return DefineReshaped(lowering, **x, std::move(shape));
}

absl::Status LowerIdentity(Lowering& lowering) {
  auto x = lowering.Input(0);
  if (!x.ok()) return x.status();
  return DefineReshaped(lowering, **x, (*x)->shape);
}

// Inference only: the identity.
absl::Status LowerDropout(Lowering& lowering) {
  auto ratio = lowering.FloatAttribute("ratio", 0.5f);
  if (!ratio.ok()) return ratio.status();
  auto seed = lowering.IntAttribute("seed", 0);
  if (!seed.ok()) return seed.status();
  if (absl::Status status = lowering.LimitOutputs(1); !status.ok()) return status;
  if (const Operand* training = lowering.InputOrNull(2)) {
    const bool off = training->is_constant() && training->dtype == DType::kBool &&
                     training->constant->elements() == 1 && !*training->constant->As<bool>();
    if (!off)
      return lowering.Unimplemented(
          "training_mode is not a constant false: export the model for inference");
  }
  return LowerIdentity(lowering);
}

absl::Status LowerConstant(Lowering& lowering) {
  absl::StatusOr<Tensor> tensor = lowering.Unimplemented(
      "only value, value_float, value_floats, value_int and value_ints are supported");
  if (lowering.HasAttribute("value")) {
    auto value = lowering.TensorAttributeOrNull("value");
    if (!value.ok()) return value.status();
    tensor = Convert((*value)->view(), (*value)->dtype());
  } else if (lowering.HasAttribute("value_float")) {
    auto value = lowering.FloatAttribute("value_float", 0);
    if (!value.ok()) return value.status();
    tensor = Tensor::Allocate(DType::kFloat32, {});
    if (tensor.ok()) *tensor->As<float>() = *value;
  } else if (lowering.HasAttribute("value_int")) {
    auto value = lowering.IntAttribute("value_int", 0);
    if (!value.ok()) return value.status();
    tensor = Tensor::Allocate(DType::kInt64, {});
    if (tensor.ok()) *tensor->As<int64_t>() = *value;
  } else if (lowering.HasAttribute("value_floats")) {
    auto value = lowering.FloatsAttribute("value_floats");
    if (!value.ok()) return value.status();
    tensor = Tensor::Allocate(DType::kFloat32, {static_cast<int64_t>(value->size())});
    if (tensor.ok()) std::memcpy(tensor->data(), value->data(), tensor->bytes());
  } else if (lowering.HasAttribute("value_ints")) {
    auto value = lowering.IntsAttribute("value_ints");
    if (!value.ok()) return value.status();
    tensor = Tensor::Allocate(DType::kInt64, {static_cast<int64_t>(value->size())});
    if (tensor.ok()) std::memcpy(tensor->data(), value->data(), tensor->bytes());
  }
  if (!tensor.ok()) return tensor.status();
  Operand operand;
  operand.dtype = tensor->dtype();
  operand.shape = tensor->shape();
  operand.constant = std::make_shared<const Tensor>(*std::move(tensor));
  lowering.Define(0, std::move(operand));
  return absl::OkStatus();
}

}  // namespace espalier::graph
