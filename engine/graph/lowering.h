// lowering.h — what an op's lowering function sees: the node, its operands and attributes, and the
// program being built.
//
// An op is one line in ops.inc and one function `absl::Status Lower<Op>(Lowering&)` in ops/: read
// every attribute that the op knows (what is left unread is refused), check the operands, emit
// steps, define the outputs.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/formats/model_graph.h"
#include "engine/graph/lower.h"
#include "engine/graph/program.h"

namespace espalier::graph {

// The way out for a model whose nodes mix the items of a batch. Setting max_batch_size to 0 alone
// is none: a first dimension without a number is always served as the batch.
inline constexpr absl::string_view kRunAsItIs =
    "export the model with a fixed first dimension and set max_batch_size to 0, to run it as it is";

// What a name stands for: a constant, or a runtime value seen with a shape (several names may see
// one value).
struct Operand {
  std::string name;
  DType dtype = DType::kFloat32;           // logical
  Shape shape;                             // kBatch first when runtime and batched
  int value = -1;                          // index into Program::values; -1: constant
  std::shared_ptr<const Tensor> constant;  // of `dtype`, or wider
  std::string initializer;                 // that the constant was made from; empty: none

  bool is_constant() const { return constant != nullptr; }
  int rank() const { return static_cast<int>(shape.size()); }
};

class Lowering {
 public:
  Lowering(Program* program, const LowerOptions& options, int64_t opset)
      : program_(program), options_(options), opset_(opset) {}

  // --- the node ---
  const formats::Node& node() const { return *node_; }
  int64_t opset() const { return opset_; }
  const std::string& source() const { return program_->source; }
  bool batched() const { return options_.max_batch_size > 0; }
  int input_count() const { return static_cast<int>(node_->inputs.size()); }
  // Null when omitted.
  const Operand* InputOrNull(int i) const;
  absl::StatusOr<const Operand*> Input(int i) const;
  // Input i as one of the computable floats (f32, f16, bf16).
  absl::StatusOr<const Operand*> FloatInput(int i) const;
  // Outputs beyond `count` that somebody asks for are refused.
  absl::Status LimitOutputs(int count) const;

  absl::StatusOr<int64_t> IntAttribute(const std::string& name, int64_t otherwise);
  absl::StatusOr<float> FloatAttribute(const std::string& name, float otherwise);
  absl::StatusOr<std::string> StringAttribute(const std::string& name,
                                              const std::string& otherwise);
  // Empty when absent.
  absl::StatusOr<std::vector<int64_t>> IntsAttribute(const std::string& name);
  absl::StatusOr<std::vector<float>> FloatsAttribute(const std::string& name);
  bool HasAttribute(const std::string& name) const { return node_->attributes.contains(name); }
  // Null when absent.
  absl::StatusOr<const Tensor*> TensorAttributeOrNull(const std::string& name);

  // --- the outcome ---
  // Output i is another name for `operand` (seen with its shape and dtype).
  void Define(int i, Operand operand);
  // Appends a step that computes a new value of this shape and type.
  absl::StatusOr<Operand> Emit(std::unique_ptr<Op> op, std::vector<int> inputs, DType dtype,
                               const Shape& shape);
  // Emit, and define output 0.
  absl::Status EmitOutput(std::unique_ptr<Op> op, std::vector<int> inputs, DType dtype,
                          const Shape& shape);
  // The value behind an operand; a constant joins the program in its storage type.
  absl::StatusOr<int> ValueOf(const Operand& operand);
  // `tensor`, which is `matrix` as [out, in], for linear layers; the same tensor twice is one weight.
  int AddWeight(const Operand& matrix, std::shared_ptr<const Tensor> tensor);
  // What becomes of this constant cannot be changed an element at a time.
  void NoteDerived(const Operand& operand);
  // The transpose of a constant matrix; made once per constant.
  absl::StatusOr<std::shared_ptr<const Tensor>> Transposed(const Operand& matrix);

  // --- shapes ---
  // Elements per item: the product without the batch dimension.
  int64_t ItemElements(const Shape& shape) const;
  // Normalises a possibly negative axis to [0, limit). InvalidArgument outside.
  absl::StatusOr<int64_t> Axis(int64_t axis, int64_t limit) const;

  // --- refusals: "model.onnx: node 'fc1' (Gemm): <text>" ---
  absl::Status Unimplemented(absl::string_view text) const;
  absl::Status Invalid(absl::string_view text) const;
  absl::Status Exhausted(absl::string_view text) const;

  // --- for the driver (lower.cc) ---
  absl::Status BeginNode(const formats::Node* node);
  // Refuses attributes nobody read and outputs nobody defined.
  absl::Status EndNode() const;
  absl::Status Bind(Operand operand);  // InvalidArgument for a name that is taken
  const Operand* FindOrNull(const std::string& name) const;
  absl::StatusOr<int> NewValue(const std::string& name, Value::Role role, DType storage,
                               const Shape& shape);

 private:
  std::string Where() const;
  // Notes that `tensor`, made from `operand`, is Program::weights[index] or values[index].
  void NoteUse(const Operand& operand, const std::shared_ptr<const Tensor>& tensor, int index,
               std::vector<Initializer::Use> Initializer::*uses);
  template <typename T>
  absl::StatusOr<T> Attribute(const std::string& name, T otherwise, const char* type);

  Program* program_;
  const LowerOptions& options_;
  const int64_t opset_;
  const formats::Node* node_ = nullptr;
  std::set<std::string> read_;  // attributes of node_
  absl::flat_hash_map<std::string, Operand> names_;
  // Keys own their tensors: an address that is freed and used again would name another constant.
  absl::flat_hash_map<std::shared_ptr<const Tensor>, int> weight_of_;
  absl::flat_hash_map<std::shared_ptr<const Tensor>, int> value_of_;
  absl::flat_hash_map<std::shared_ptr<const Tensor>, std::shared_ptr<const Tensor>> transposed_;
};

using LowerFn = absl::Status (*)(Lowering&);

// The entry for a node, or an Unimplemented that lists what there is.
absl::StatusOr<LowerFn> FindOp(const std::string& domain, const std::string& op_type,
                               int64_t opset);

}  // namespace espalier::graph
