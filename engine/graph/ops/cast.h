// cast.h — conversion between element types: Cast, and the conversions at the model's inputs and
// outputs.
#pragma once

#include "engine/graph/op.h"
#include "engine/tensor/tensor.h"

namespace espalier::graph {

// y = x as storage `to`, rounded to `through` on the way (f32 → f16 → f32 is a Cast to FLOAT16 of
// an f32 activation).
class CastOp final : public Op {
 public:
  CastOp(DType from, DType through, DType to, int64_t item_elements)
      : from_(from), through_(through), to_(to), item_elements_(item_elements) {}

  kernels::KernelStatus Run(const RunContext& context, const Step& step) const override;

 private:
  kernels::KernelStatus RunOnDevice(const RunContext& context, const Step& step) const;

  const DType from_, through_, to_;
  const int64_t item_elements_;
};

}  // namespace espalier::graph
