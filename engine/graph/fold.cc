#include "engine/graph/fold.h"

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/graph/executor.h"
#include "engine/graph/ops/linear.h"

namespace espalier::graph {
namespace {

absl::StatusOr<Tensor> Copy(const TensorView& tensor) { return Convert(tensor, tensor.dtype); }

// A product of constants in double, rounded once: nobody waits for it while serving.
kernels::KernelStatus RunReference(const kernels::KernelContext&, const kernels::LinearArgs& args) {
  std::vector<double> y(static_cast<size_t>(args.tokens * args.weight.out));
  kernels::ReferenceLinear(args, y.data(), nullptr);
  for (size_t i = 0; i < y.size(); ++i) static_cast<float*>(args.y)[i] = static_cast<float>(y[i]);
  return {};
}

constexpr kernels::LinearVariant kReference = {.name = "reference",
                                               .layout = kernels::Layout::kDense,
                                               .arch = kernels::Arch::kCpu,
                                               .batch_invariant = true,
                                               .supports = nullptr,
                                               .packing = nullptr,
                                               .packed_bytes = nullptr,
                                               .pack = nullptr,
                                               .locate = nullptr,
                                               .scratch_bytes = nullptr,
                                               .run = RunReference};

kernels::WeightView DenseView(const Tensor& weight) {
  kernels::WeightView view;
  view.layout = kernels::Layout::kDense;
  view.dtype = weight.dtype();
  view.out = weight.shape()[0];
  view.in = weight.shape()[1];
  view.count = weight.elements();
  view.values = weight.data();
  return view;
}

absl::StatusOr<formats::ModelGraph> AsModel(const Lowering& lowering, const std::string& source) {
  const formats::Node& node = lowering.node();
  formats::ModelGraph model;
  model.source = source;
  model.opset = lowering.opset();
  model.nodes.push_back({node.name, node.op_type, node.domain, node.inputs, node.outputs, {}});
  for (const auto& [name, value] : node.attributes) {
    if (const Tensor* tensor = std::get_if<Tensor>(&value)) {
      auto copy = Copy(tensor->view());
      if (!copy.ok()) return copy.status();
      model.nodes[0].attributes.emplace(name, *std::move(copy));
      continue;
    }
    std::visit(
        [&, key = &name](const auto& plain) {
          if constexpr (!std::is_same_v<std::decay_t<decltype(plain)>, Tensor>) {
            model.nodes[0].attributes.emplace(*key, plain);
          }
        },
        value);
  }
  for (int i = 0; i < lowering.input_count(); ++i) {
    const Operand* operand = lowering.InputOrNull(i);
    if (operand == nullptr) continue;
    if (i == 0) {
      model.inputs.push_back({operand->name, operand->dtype, operand->shape});
    } else if (operand->name != model.inputs[0].name &&
               !model.initializers.contains(operand->name)) {
      auto copy = Copy(operand->constant->view());
      if (!copy.ok()) return copy.status();
      model.initializers.emplace(operand->name, *std::move(copy));
    }
  }
  for (const std::string& output : node.outputs) {
    if (!output.empty()) model.outputs.push_back({output});
  }
  return model;
}

}  // namespace

absl::Status FoldNode(Lowering& lowering, int64_t& bytes_left) {
  const Tensor& first = *lowering.InputOrNull(0)->constant;
  auto model = AsModel(lowering, lowering.source());
  if (!model.ok()) return model.status();
  auto program = LowerUndeclared(*std::move(model));
  if (!program.ok()) return program.status();
  for (int i = 0; i < lowering.input_count(); ++i) {
    if (const Operand* operand = lowering.InputOrNull(i)) lowering.NoteDerived(*operand);
  }
  std::vector<LinearBinding> bindings;
  for (const LinearOp* linear : program->linears) {
    if (linear->tokens_per_item() > kMaxFoldedProducts / linear->out() / linear->in()) {
      return lowering.Exhausted(
          absl::StrCat("a product of constants with more than ", kMaxFoldedProducts,
                       " multiplications: compute it before exporting the model"));
    }
    bindings.push_back({&kReference, DenseView(*program->weights[linear->weight()].tensor)});
  }
  for (const Value& value : program->values) {
    const int64_t bytes = value.elements * static_cast<int64_t>(SizeOf(value.storage));
    if (value.role == Value::Role::kInput || value.role == Value::Role::kConstant) continue;
    if (bytes > bytes_left) {
      return lowering.Exhausted(absl::StrCat("folding constants into '", value.name, "' takes ",
                                             bytes, " bytes, but ", bytes_left,
                                             " are left: compute it before exporting the model"));
    }
    bytes_left -= bytes;
  }
  const auto device = MakeCpuDevice(1);
  const Executor executor(*program, *device, {1}, {bindings});
  auto state = executor.NewState();
  if (!state.ok()) return state.status();
  std::memcpy((*state)->input(0), first.data(), first.bytes());
  if (absl::Status status = executor.Run(**state, 1); !status.ok()) return status;
  for (size_t i = 0; i < program->outputs.size(); ++i) {
    const formats::ValueInfo& output = program->outputs[i];
    auto result = Copy({output.dtype, output.shape, (*state)->output(static_cast<int>(i))});
    if (!result.ok()) return result.status();
    Operand operand;
    operand.dtype = output.dtype;
    operand.shape = output.shape;
    operand.constant = std::make_shared<const Tensor>(*std::move(result));
    for (size_t j = 0; j < lowering.node().outputs.size(); ++j) {
      if (lowering.node().outputs[j] == output.name) lowering.Define(static_cast<int>(j), operand);
    }
  }
  return absl::OkStatus();
}

}  // namespace espalier::graph
