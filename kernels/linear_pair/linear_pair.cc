#include "kernels/linear_pair/linear_pair.h"

#include "kernels/cuda/block_image.h"
#include "kernels/cuda/linear_pair_shape.h"
#include "kernels/cuda/op_table.h"

namespace espalier::kernels {

bool FitsLinearPair(const LinearDesc& first, const LinearDesc& second, Arch arch) {
  for (const LinearDesc* desc : {&first, &second}) {
    if (!cuda::FitsBlockImage(*desc) || desc->block_rows != 64 || desc->block_cols < 64)
      return false;
  }
  // Column and row numbers are kept in two bytes.
  if (arch != Arch::kSm90 || first.io_dtype != second.io_dtype || first.out != second.in ||
      first.tokens != second.tokens || first.in > 64 * UINT16_MAX || first.out > 64 * UINT16_MAX) {
    return false;
  }
  const auto view_of = [](const LinearDesc& desc) {
    WeightView view;
    view.layout = desc.layout;
    view.out = desc.out, view.in = desc.in;
    view.block_rows = desc.block_rows, view.block_cols = desc.block_cols;
    view.count = desc.count;
    return view;
  };
  const cuda::PairShape shape = cuda::PairShapeOf(view_of(first), view_of(second));
  if (shape.panels1 > UINT16_MAX || shape.panels2 > UINT16_MAX) return false;
  for (const cuda::PairTile& tile : cuda::kPairTiles) {
    if (cuda::PairStages(tile, shape) > 0) return true;
  }
  return false;
}

KernelStatus RunLinearPair(const KernelContext& ctx, const LinearPairArgs& args) {
  if (ctx.ops == nullptr) return {KernelCode::kUnsupported, "linear pair: needs a GPU"};
  return ctx.ops->linear_pair(ctx, args);
}

}  // namespace espalier::kernels
