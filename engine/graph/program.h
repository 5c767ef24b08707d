// program.h — a lowered model: a straight list of steps over numbered values. No control flow, no
// names to look up.
//
// f32, f16 and bf16 are all f32 while they are computed with; every other type is stored as it is
// and only moved or cast. The first dimension of a runtime value is the batch when the program is
// batched, and only that one.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/formats/model_graph.h"
#include "engine/graph/op.h"
#include "engine/tensor/tensor.h"

namespace espalier::graph {

class LinearOp;

struct Value {
  enum class Role : uint8_t {
    kInput,       // buffer of model input `index`, in its declared dtype
    kOutput,      // buffer of model output `index`, in its declared dtype
    kActivation,  // in the arena
    kConstant,    // `constant`
  };
  std::string name;
  Role role = Role::kActivation;
  int index = 0;
  DType storage = DType::kFloat32;
  int64_t elements = 0;  // per item; of a constant: all
  std::shared_ptr<const Tensor> constant;
  // On a GPU: rows of `width` elements, `row_stride` elements apart. 0: all elements back to back.
  int64_t width = 0, row_stride = 0;
};

// Memory of a value at `batch` items.
size_t BytesOf(const Value& value, int64_t batch);

// A constant matrix that linear layers multiply with, [out, in].
struct Weight {
  std::string name;                      // initializer, or the node that folding made it from
  std::shared_ptr<const Tensor> tensor;  // null once the planner has put it into its layouts
};

// An initializer of the file, and where in the program its elements are: what has to follow when some
// of them change.
struct Initializer {
  DType dtype = DType::kFloat32;
  Shape shape;
  // Went in as something else than its elements, too: scaled, folded, spread, a shape.
  bool derived = false;
  struct Use {
    int index = -1;           // in Program::weights, or Program::values
    bool transposed = false;  // of weights
  };
  std::vector<Use> weights;
  std::vector<Use> values;  // constants; converted to their storage
};

struct Program {
  std::string source;  // the file, for messages
  bool batched = false;
  std::vector<formats::ValueInfo> inputs, outputs;  // shapes as inferred
  std::vector<Value> values;
  std::vector<Step> steps;
  std::vector<Weight> weights;
  std::map<std::string, Initializer> initializers;  // those that some output depends on
  std::vector<LinearOp*> linears;  // the steps' ops, in order; LinearOp::layer() is the index here
};

// Memory type of a logical type: f32 for the floats that are computed with.
constexpr DType StorageOf(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? DType::kFloat32 : dtype;
}

// The same program over constants of its own, as far as initializers went into them element by element; what nothing
// can change is shared, and what has gone to a GPU is its executor's to copy. ResourceExhausted without memory.
absl::StatusOr<Program> CloneOf(const Program& program);

// One line a step: "fc1 (Gemm): linear 784 -> 512 + bias + relu: v0 v1 -> v3".
std::string Listing(const Program& program);

}  // namespace espalier::graph
