#include "engine/graph/lowering.h"

#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "engine/graph/ops/transpose.h"

namespace espalier::graph {

const Operand* Lowering::FindOrNull(const std::string& name) const {
  const auto it = names_.find(name);
  return it == names_.end() ? nullptr : &it->second;
}

const Operand* Lowering::InputOrNull(int i) const {
  if (i >= input_count() || node_->inputs[i].empty()) return nullptr;
  return FindOrNull(node_->inputs[i]);
}

absl::StatusOr<const Operand*> Lowering::Input(int i) const {
  if (const Operand* operand = InputOrNull(i)) return operand;
  return Invalid(absl::StrCat("input ", i, " is missing"));
}

absl::StatusOr<const Operand*> Lowering::FloatInput(int i) const {
  auto operand = Input(i);
  if (operand.ok() && StorageOf((*operand)->dtype) != DType::kFloat32) {
    return Unimplemented(
        absl::StrCat("input '", (*operand)->name, "' is ", NameOf((*operand)->dtype),
                     "; this op computes with FP32, FP16 or BF16: cast the input before it"));
  }
  return operand;
}

absl::Status Lowering::LimitOutputs(int count) const {
  for (size_t i = count; i < node_->outputs.size(); ++i) {
    if (node_->outputs[i].empty()) continue;
    return Unimplemented(absl::StrCat("optional output '", node_->outputs[i], "' (number ", i,
                                      ") is not computed: export the model without it"));
  }
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<T> Lowering::Attribute(const std::string& name, T otherwise, const char* type) {
  const auto it = node_->attributes.find(name);
  if (it == node_->attributes.end()) return otherwise;
  read_.insert(name);
  if (const T* value = std::get_if<T>(&it->second)) return *value;
  return Invalid(absl::StrCat("attribute '", name, "' is not of type ", type));
}

absl::StatusOr<int64_t> Lowering::IntAttribute(const std::string& name, int64_t otherwise) {
  return Attribute<int64_t>(name, otherwise, "INT");
}
absl::StatusOr<float> Lowering::FloatAttribute(const std::string& name, float otherwise) {
  return Attribute<float>(name, otherwise, "FLOAT");
}
absl::StatusOr<std::string> Lowering::StringAttribute(const std::string& name,
                                                      const std::string& otherwise) {
  return Attribute<std::string>(name, otherwise, "STRING");
}
absl::StatusOr<std::vector<int64_t>> Lowering::IntsAttribute(const std::string& name) {
  return Attribute<std::vector<int64_t>>(name, {}, "INTS");
}

absl::StatusOr<std::vector<float>> Lowering::FloatsAttribute(const std::string& name) {
  return Attribute<std::vector<float>>(name, {}, "FLOATS");
}

absl::StatusOr<const Tensor*> Lowering::TensorAttributeOrNull(const std::string& name) {
  const auto it = node_->attributes.find(name);
  if (it == node_->attributes.end()) return nullptr;
  read_.insert(name);
  if (const Tensor* value = std::get_if<Tensor>(&it->second)) return value;
  return Invalid(absl::StrCat("attribute '", name, "' is not of type TENSOR"));
}

void Lowering::Define(int i, Operand operand) {
  if (i >= static_cast<int>(node_->outputs.size()) || node_->outputs[i].empty()) return;
  operand.name = node_->outputs[i];
  names_[operand.name] = std::move(operand);
}

absl::StatusOr<int> Lowering::NewValue(const std::string& name, Value::Role role, DType storage,
                                       const Shape& shape) {
  Shape item = shape;
  if (batched() && !item.empty() && item[0] == kBatch) item[0] = 1;
  auto elements = ElementCount(item);
  if (!elements.ok())
    return Invalid(absl::StrCat("value '", name, "': ", elements.status().message()));
  const int64_t items = batched() ? options_.max_batch_size : 1;
  const int64_t limit = kMaxValueBytes / items / static_cast<int64_t>(SizeOf(storage));
  if (*elements > limit) {
    return Exhausted(absl::StrCat("value '", name, "' of shape ", ToString(shape), " at batch ",
                                  items, " is above ", kMaxValueBytes,
                                  " bytes: lower max_batch_size or shrink the model"));
  }
  Value value;
  value.name = name;
  value.role = role;
  value.storage = storage;
  value.elements = *elements;
  program_->values.push_back(std::move(value));
  return static_cast<int>(program_->values.size()) - 1;
}

absl::StatusOr<Operand> Lowering::Emit(std::unique_ptr<Op> op, std::vector<int> inputs, DType dtype,
                                       const Shape& shape) {
  const std::string name = node_ == nullptr ? program_->values[inputs[0]].name : node_->outputs[0];
  auto value = NewValue(name, Value::Role::kActivation, StorageOf(dtype), shape);
  if (!value.ok()) return value.status();
  Step step;
  step.node = node_ == nullptr ? name : node_->name;
  step.op_type = node_ == nullptr ? "convert" : node_->op_type;
  step.inputs = std::move(inputs);
  step.output = *value;
  step.op = std::move(op);
  program_->steps.push_back(std::move(step));
  Operand operand;
  operand.name = name;
  operand.dtype = dtype;
  operand.shape = shape;
  operand.value = *value;
  return operand;
}

absl::Status Lowering::EmitOutput(std::unique_ptr<Op> op, std::vector<int> inputs, DType dtype,
                                  const Shape& shape) {
  auto operand = Emit(std::move(op), std::move(inputs), dtype, shape);
  if (!operand.ok()) return operand.status();
  Define(0, *std::move(operand));
  return absl::OkStatus();
}

absl::StatusOr<int> Lowering::ValueOf(const Operand& operand) {
  if (!operand.is_constant()) return operand.value;
  if (const auto it = value_of_.find(operand.constant); it != value_of_.end()) return it->second;
  Value value;
  value.name = operand.name;
  value.role = Value::Role::kConstant;
  value.storage = StorageOf(operand.dtype);
  value.elements = operand.constant->elements();
  value.constant = operand.constant;
  if (value.storage != operand.constant->dtype()) {
    auto converted = Convert(operand.constant->view(), value.storage);
    if (!converted.ok()) return converted.status();
    value.constant = std::make_shared<const Tensor>(*std::move(converted));
  }
  program_->values.push_back(std::move(value));
  const int index = static_cast<int>(program_->values.size()) - 1;
  NoteUse(operand, operand.constant, index, &Initializer::values);
  return value_of_[operand.constant] = index;
}

int Lowering::AddWeight(const Operand& matrix, std::shared_ptr<const Tensor> tensor) {
  const auto [it, inserted] =
      weight_of_.try_emplace(tensor, static_cast<int>(program_->weights.size()));
  if (inserted) {
    NoteUse(matrix, tensor, it->second, &Initializer::weights);
    program_->weights.push_back({matrix.name, std::move(tensor)});
  }
  return it->second;
}

void Lowering::NoteDerived(const Operand& operand) {
  const auto it = program_->initializers.find(operand.initializer);
  if (it != program_->initializers.end()) it->second.derived = true;
}

// By identity: whatever computes with a constant makes another tensor of it.
void Lowering::NoteUse(const Operand& operand, const std::shared_ptr<const Tensor>& tensor,
                       int index, std::vector<Initializer::Use> Initializer::*uses) {
  const auto it = program_->initializers.find(operand.initializer);
  if (it == program_->initializers.end()) return;
  const std::shared_ptr<const Tensor>& original = names_.at(operand.initializer).constant;
  const auto transposed = transposed_.find(original);
  if (tensor == original) {
    (it->second.*uses).push_back({index, false});
  } else if (transposed != transposed_.end() && tensor == transposed->second) {
    (it->second.*uses).push_back({index, true});
  } else {
    it->second.derived = true;
  }
}

absl::StatusOr<std::shared_ptr<const Tensor>> Lowering::Transposed(const Operand& matrix) {
  std::shared_ptr<const Tensor>& cached = transposed_[matrix.constant];
  if (cached != nullptr) return cached;
  auto tensor = TransposedMatrix(*matrix.constant);
  if (!tensor.ok()) return tensor.status();
  cached = std::make_shared<const Tensor>(*std::move(tensor));
  return cached;
}

int64_t Lowering::ItemElements(const Shape& shape) const {
  int64_t count = 1;
  for (size_t i = 0; i < shape.size(); ++i) count *= shape[i] == kBatch ? 1 : shape[i];
  return count;
}

absl::StatusOr<int64_t> Lowering::Axis(int64_t axis, int64_t limit) const {
  if (axis >= -limit && axis < limit) return axis < 0 ? axis + limit : axis;
  return Invalid(absl::StrCat("axis ", axis, " is outside [", -limit, ", ", limit - 1, "]"));
}

std::string Lowering::Where() const {
  if (node_ == nullptr) return program_->source;
  return absl::StrCat(program_->source, ": node '", node_->name, "' (", node_->op_type, ")");
}
absl::Status Lowering::Unimplemented(absl::string_view text) const {
  return absl::UnimplementedError(absl::StrCat(Where(), ": ", text));
}
absl::Status Lowering::Invalid(absl::string_view text) const {
  return absl::InvalidArgumentError(absl::StrCat(Where(), ": ", text));
}
absl::Status Lowering::Exhausted(absl::string_view text) const {
  return absl::ResourceExhaustedError(absl::StrCat(Where(), ": ", text));
}

absl::Status Lowering::BeginNode(const formats::Node* node) {
  node_ = node;
  read_.clear();
  if (node == nullptr) return absl::OkStatus();
  if (node->outputs.empty() || node->outputs[0].empty())
    return Invalid("the node has no first output");
  for (const std::string& input : node->inputs) {
    if (!input.empty() && FindOrNull(input) == nullptr) {
      return Invalid(absl::StrCat("input '", input, "' is not produced before this node"));
    }
  }
  for (const std::string& output : node->outputs) {
    if (!output.empty() && FindOrNull(output) != nullptr) {
      return Invalid(absl::StrCat("output '", output, "' is already produced elsewhere"));
    }
  }
  return absl::OkStatus();
}

absl::Status Lowering::EndNode() const {
  for (const auto& [name, value] : node_->attributes) {
    if (!read_.contains(name)) {
      return Unimplemented(
          absl::StrCat("attribute '", name, "' is not supported: export the model without it"));
    }
  }
  for (const std::string& output : node_->outputs) {
    if (!output.empty() && FindOrNull(output) == nullptr) {
      return Unimplemented(
          absl::StrCat("output '", output, "' is not computed: export the model without it"));
    }
  }
  return absl::OkStatus();
}

absl::Status Lowering::Bind(Operand operand) {
  std::string name = operand.name;
  if (!names_.try_emplace(name, std::move(operand)).second) {
    return Invalid(absl::StrCat("the name '", name, "' is defined twice"));
  }
  return absl::OkStatus();
}

}  // namespace espalier::graph
