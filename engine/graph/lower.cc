#include "engine/graph/lower.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "engine/graph/fold.h"
#include "engine/graph/fuse.h"
#include "engine/graph/lowering.h"
#include "engine/graph/ops/cast.h"
#include "engine/graph/ops/linear.h"
#include "engine/graph/patterns.h"

namespace espalier::graph {
namespace {

// The nodes that some output depends on, in order. The others are never looked at: an op that
// cannot run does no harm where nobody asks for its result.
std::vector<const formats::Node*> LiveNodes(const formats::ModelGraph& graph,
                                            absl::flat_hash_set<std::string>& names) {
  for (const formats::ValueInfo& output : graph.outputs) names.insert(output.name);
  std::vector<const formats::Node*> live;
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    const auto wanted = [&](const std::string& name) {
      return !name.empty() && names.contains(name);
    };
    if (std::none_of(node->outputs.begin(), node->outputs.end(), wanted)) continue;
    for (const std::string& input : node->inputs) {
      if (!input.empty()) names.insert(input);
    }
    live.push_back(&*node);
  }
  std::reverse(live.begin(), live.end());
  return live;
}

class GraphLowerer {
 public:
  GraphLowerer(formats::ModelGraph& graph, const LowerOptions& options)
      : graph_(graph), options_(options), lowering_(&program_, options, graph.opset) {
    program_.source = graph.source;
    program_.batched = options.max_batch_size > 0;
  }

  absl::StatusOr<Program> Run(bool outputs_declared) {
    absl::flat_hash_set<std::string> names;
    const std::vector<const formats::Node*> nodes = LiveNodes(graph_, names);
    if (absl::Status status = BindConstants(names); !status.ok()) return status;
    for (size_t i = 0; i < graph_.inputs.size(); ++i) {
      if (absl::Status status = BindInput(static_cast<int>(i)); !status.ok()) return status;
    }
    for (const formats::Node* node : nodes) {
      if (absl::Status status = LowerNode(*node); !status.ok()) return status;
    }
    for (size_t i = 0; i < graph_.outputs.size(); ++i) {
      if (absl::Status status = BindOutput(static_cast<int>(i), outputs_declared); !status.ok())
        return status;
    }
    if (options_.fuse) FuseLinearEpilogues(program_);
    for (Step& step : program_.steps) {
      if (auto* linear = dynamic_cast<LinearOp*>(step.op.get())) {
        linear->set_layer(static_cast<int>(program_.linears.size()));
        program_.linears.push_back(linear);
      }
    }
    return std::move(program_);
  }

 private:
  absl::Status BindConstants(const absl::flat_hash_set<std::string>& names) {
    int64_t bytes = 0;
    for (auto& [name, tensor] : graph_.initializers) {
      if (!names.contains(name)) continue;
      Operand operand;
      operand.name = name;
      operand.dtype = tensor.dtype();
      operand.shape = tensor.shape();
      bytes += static_cast<int64_t>(tensor.bytes());
      operand.initializer = name;
      // A single element may be gone into a fused pattern or be spread over a bias.
      program_.initializers[name] = {
          tensor.dtype(), tensor.shape(),
          tensor.elements() <= 1 || StorageOf(tensor.dtype()) != DType::kFloat32};
      operand.constant = std::make_shared<const Tensor>(std::move(tensor));
      if (absl::Status status = lowering_.Bind(std::move(operand)); !status.ok()) return status;
    }
    graph_.initializers.clear();
    folded_bytes_left_ = bytes + kMaxFoldedBytes;
    return absl::OkStatus();
  }

  // The buffer of a model input in its declared type, and its conversion to what is computed with.
  absl::Status BindInput(int i) {
    const formats::ValueInfo& info = graph_.inputs[i];
    const std::string where =
        absl::StrCat("input '", info.name, "' of shape ", ToString(info.shape));
    if (info.dtype == DType::kBytes) {
      return lowering_.Unimplemented(
          absl::StrCat(where, " holds strings: convert them before the model"));
    }
    const bool symbolic = !info.shape.empty() && info.shape[0] == kBatch;
    if (lowering_.batched() && !symbolic) {
      return lowering_.Invalid(absl::StrCat(
          where, " has no batch dimension, but max_batch_size is ", options_.max_batch_size,
          ": export with a dynamic first dimension, or set max_batch_size to 0"));
    }
    if (!lowering_.batched() && symbolic) {
      return lowering_.Invalid(absl::StrCat(
          where, " has a batch dimension, but max_batch_size is 0: set max_batch_size"));
    }
    for (size_t axis = symbolic ? 1 : 0; axis < info.shape.size(); ++axis) {
      if (info.shape[axis] > 0) continue;
      return lowering_.Unimplemented(absl::StrCat(where, ": dimension ", axis,
                                                  " is not a positive number; only the first "
                                                  "dimension may be dynamic"));
    }
    auto value = lowering_.NewValue(info.name, Value::Role::kInput, info.dtype, info.shape);
    if (!value.ok()) return value.status();
    program_.values[*value].index = i;
    program_.inputs.push_back(info);
    Operand operand;
    operand.name = info.name;
    operand.dtype = info.dtype;
    operand.shape = info.shape;
    operand.value = *value;
    if (StorageOf(info.dtype) != info.dtype) {
      auto converted =
          lowering_.Emit(std::make_unique<CastOp>(info.dtype, info.dtype, StorageOf(info.dtype),
                                                  program_.values[*value].elements),
                         {*value}, info.dtype, info.shape);
      if (!converted.ok()) return converted.status();
      operand.value = converted->value;
    }
    return lowering_.Bind(std::move(operand));
  }

  absl::Status LowerNode(const formats::Node& node) {
    if (absl::Status status = lowering_.BeginNode(&node); !status.ok()) return status;
    auto lower = FindOp(node.domain, node.op_type, graph_.opset);
    if (!lower.ok()) return lowering_.Unimplemented(lower.status().message());
    bool constant = !node.inputs.empty();
    for (int i = 0; i < lowering_.input_count(); ++i) {
      const Operand* operand = lowering_.InputOrNull(i);
      constant = constant && (operand == nullptr ? i > 0 : operand->is_constant());
    }
    // Several names of one constant stay one constant.
    if (node.op_type == "Identity" && node.domain.empty()) constant = false;
    absl::Status status = constant ? FoldNode(lowering_, folded_bytes_left_) : (*lower)(lowering_);
    if (status.ok() && !constant) status = lowering_.EndNode();
    lowering_.BeginNode(nullptr).IgnoreError();
    return status;
  }

  absl::Status CheckDeclared(const formats::ValueInfo& info, const Operand& operand) const {
    bool fits = info.shape.empty() || info.shape.size() == operand.shape.size();
    for (size_t axis = 0; fits && axis < info.shape.size(); ++axis) {
      fits = info.shape[axis] < 0 || operand.shape[axis] < 0 ||
             info.shape[axis] == operand.shape[axis];
    }
    if (fits && info.dtype == operand.dtype) return absl::OkStatus();
    return lowering_.Invalid(absl::StrCat(
        "output '", info.name, "' is declared ", NameOf(info.dtype), " ", ToString(info.shape),
        ", but the nodes make ", NameOf(operand.dtype), " ", ToString(operand.shape)));
  }

  absl::Status BindOutput(int i, bool declared) {
    const formats::ValueInfo& info = graph_.outputs[i];
    const Operand* operand = lowering_.FindOrNull(info.name);
    if (operand == nullptr)
      return lowering_.Invalid(absl::StrCat("output '", info.name, "' is not produced"));
    if (operand->is_constant()) {
      return lowering_.Unimplemented(absl::StrCat("output '", info.name,
                                                  "' does not depend on any input: remove it from "
                                                  "the model's outputs"));
    }
    if (declared) {
      if (absl::Status status = CheckDeclared(info, *operand); !status.ok()) return status;
    }
    program_.outputs.push_back({info.name, operand->dtype, operand->shape});
    Value& source = program_.values[operand->value];
    if (source.role == Value::Role::kActivation && source.storage == operand->dtype) {
      source.role = Value::Role::kOutput;
      source.index = i;
      return absl::OkStatus();
    }
    const DType from = source.storage;
    auto value =
        lowering_.NewValue(info.name, Value::Role::kOutput, operand->dtype, operand->shape);
    if (!value.ok()) return value.status();
    program_.values[*value].index = i;
    Step step;
    step.node = info.name;
    step.op_type = "output";
    step.inputs = {operand->value};
    step.output = *value;
    step.op = std::make_unique<CastOp>(from, operand->dtype, operand->dtype,
                                       program_.values[*value].elements);
    program_.steps.push_back(std::move(step));
    return absl::OkStatus();
  }

  formats::ModelGraph& graph_;
  const LowerOptions& options_;
  Program program_;
  Lowering lowering_;
  int64_t folded_bytes_left_ = 0;
};

}  // namespace

absl::StatusOr<Program> Lower(formats::ModelGraph graph, const LowerOptions& options) {
  FusePatterns(graph);
  return GraphLowerer(graph, options).Run(/*outputs_declared=*/true);
}

absl::StatusOr<Program> LowerUndeclared(formats::ModelGraph graph) {
  const LowerOptions options;
  return GraphLowerer(graph, options).Run(/*outputs_declared=*/false);
}

}  // namespace espalier::graph
