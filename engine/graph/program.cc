#include "engine/graph/program.h"

#include "absl/strings/str_cat.h"
#include "engine/graph/ops/linear.h"

namespace espalier::graph {

size_t BytesOf(const Value& value, int64_t batch) {
  const int64_t elements = value.elements * batch;
  const int64_t stored = value.width > 0 ? elements / value.width * value.row_stride : elements;
  return static_cast<size_t>(stored) * SizeOf(value.storage);
}

absl::StatusOr<Program> CloneOf(const Program& program) {
  Program clone = program;
  for (const auto& [name, initializer] : program.initializers) {
    for (const Initializer::Use& use : initializer.values) {
      if (program.values[use.index].constant == nullptr) continue;
      auto constant = program.values[use.index].constant->Clone();
      if (!constant.ok()) return constant.status();
      clone.values[use.index].constant = std::make_shared<const Tensor>(*std::move(constant));
    }
  }
  return clone;
}

std::string Listing(const Program& program) {
  std::string text;
  for (const Step& step : program.steps) {
    absl::StrAppend(&text, step.node, " (", step.op_type, "): ");
    if (const auto* linear = dynamic_cast<const LinearOp*>(step.op.get())) {
      absl::StrAppend(
          &text, "linear ", linear->in(), " -> ", linear->out(),
          linear->bias_input() < 0 ? "" : " + bias",
          linear->residual_input() < 0 ? "" : " + residual",
          linear->activation() == kernels::Activation::kNone ? "" : " + ",
          linear->activation() == kernels::Activation::kNone ? "" : NameOf(linear->activation()),
          ": ");
    }
    for (int value : step.inputs) absl::StrAppend(&text, "v", value, " ");
    absl::StrAppend(&text, "-> v", step.output, "\n");
  }
  return text;
}

}  // namespace espalier::graph
