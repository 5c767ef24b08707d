#include "kernels/cuda/linear_pair_shape.h"

#include "kernels/cuda/block_rows.h"

namespace espalier::kernels::cuda {

PairShape PairShapeOf(const WeightView& first, const WeightView& second) {
  // Blocks of 128 columns may reach a panel beyond the last column: of zeros, but read all the same.
  const auto columns = [](const WeightView& weight) {
    return static_cast<int>(weight.block_col_count() * (weight.block_cols / 64));
  };
  const auto stored = [](const WeightView& weight) {
    return StoredBlocks(weight) * (weight.block_cols / 64);
  };
  return {columns(first), columns(second), static_cast<int>(second.block_row_count()),
          stored(first), stored(second)};
}

}  // namespace espalier::kernels::cuda
