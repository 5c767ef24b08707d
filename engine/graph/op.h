// op.h — one step of a lowered model: a device-blind operation over numbered values.
//
// An op is immutable after lowering; everything that changes while serving comes in through
// RunContext. Sizes are kept per item, so that one op serves every batch: at run time there are
// `batch` items (1 when the model has no batch dimension and the whole tensor is "one item").
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/kernel_context.h"
#include "kernels/base/kernel_status.h"
#include "kernels/linear/linear.h"

namespace espalier::graph {

// The kernel and the weight a linear layer runs with in one batch bucket. Borrowed from whoever
// planned it.
struct LinearBinding {
  const kernels::LinearVariant* variant = nullptr;
  kernels::WeightView weight;
  bool paired = false;  // runs in one kernel with the other layer of its pair (linear_pairs.h)
};

struct Value;

struct RunContext {
  const kernels::KernelContext& kernel;
  int64_t batch = 1;
  void* const* values = nullptr;           // address of every value of the program
  const LinearBinding* linears = nullptr;  // of every linear layer, for this batch's bucket
  void* scratch = nullptr;
  const Value* forms = nullptr;  // type and row stride of every value
};

struct Step;

class Op {
 public:
  virtual ~Op() = default;
  virtual kernels::KernelStatus Run(const RunContext& context, const Step& step) const = 0;
  // The input whose memory the output may take when it dies here and has the same form, −1: none. It is no other input of
  // the step at the same time.
  virtual int in_place_input() const { return -1; }
};

struct Step {
  std::string node;  // name and op of the file's node, for messages
  std::string op_type;
  std::vector<int> inputs;  // values
  std::vector<int> keeps;   // further values that must not be overwritten before it has run
  int output = -1;
  std::shared_ptr<Op> op;  // shared by the clones of a program

  template <typename T>
  const T* In(const RunContext& context, int i) const {
    return static_cast<const T*>(context.values[inputs[i]]);
  }
  template <typename T>
  T* Out(const RunContext& context) const {
    return static_cast<T*>(context.values[output]);
  }
};

}  // namespace espalier::graph
