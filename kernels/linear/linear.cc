#include "kernels/linear/linear.h"

namespace espalier::kernels {

LinearDesc DescOf(const WeightView& weight, int64_t tokens, DType io_dtype) {
  return {tokens,   weight.out,        weight.in,         weight.layout, weight.dtype,
          io_dtype, weight.block_rows, weight.block_cols, weight.count};
}

}  // namespace espalier::kernels
