#include <algorithm>

#include "kernels/cuda/op_table.h"
#include "kernels/transpose/transpose.h"

namespace espalier::kernels {
namespace {

// Side of the square that is transposed at once: 32 rows of 4-byte elements are 32 cache lines read
// and written, well inside 32 KiB of L1, and every line is used whole.
constexpr int64_t kTile = 32;

// Neighbouring axes that are one walk through memory become one axis; axes of length 1 go.
TransposeArgs Merge(const TransposeArgs& args) {
  TransposeArgs merged = args;
  merged.rank = 0;
  for (int axis = 0; axis < args.rank; ++axis) {
    if (args.dims[axis] == 1) continue;
    const int last = merged.rank - 1;
    if (last >= 0 && merged.strides[last] == args.strides[axis] * args.dims[axis]) {
      merged.dims[last] *= args.dims[axis];
      merged.strides[last] = args.strides[axis];
      continue;
    }
    merged.dims[merged.rank] = args.dims[axis];
    merged.strides[merged.rank++] = args.strides[axis];
  }
  if (merged.rank == 0) {
    merged.rank = 1;
    merged.dims[0] = 1;
    merged.strides[0] = 1;
  }
  return merged;
}

// The innermost axis of y against the axis that is innermost in x, in tiles; the others walked by
// the caller.
template <typename T>
void TransposePlane(const T* x, T* y, int64_t rows, int64_t x_row, int64_t y_row, int64_t cols,
                    int64_t x_col) {
  for (int64_t r0 = 0; r0 < rows; r0 += kTile) {
    const int64_t r1 = std::min(rows, r0 + kTile);
    for (int64_t c0 = 0; c0 < cols; c0 += kTile) {
      const int64_t c1 = std::min(cols, c0 + kTile);
      for (int64_t r = r0; r < r1; ++r) {
        for (int64_t c = c0; c < c1; ++c) y[r * y_row + c] = x[r * x_row + c * x_col];
      }
    }
  }
}

template <typename T>
void TransposeTyped(const KernelContext& ctx, const TransposeArgs& args) {
  const int inner = args.rank - 1;
  int64_t y_strides[kMaxTransposeRank];
  int64_t stride = 1;
  for (int axis = inner; axis >= 0; --axis) {
    y_strides[axis] = stride;
    stride *= args.dims[axis];
  }
  // The partner of the innermost axis: the one x is contiguous along, so that tiles use whole cache
  // lines of both.
  int partner = -1;
  for (int axis = 0; axis < inner; ++axis) {
    if (partner < 0 || args.strides[axis] < args.strides[partner]) partner = axis;
  }
  const int64_t partner_dim = partner < 0 ? 1 : args.dims[partner];
  int64_t planes = 1;
  for (int axis = 0; axis < inner; ++axis) planes *= axis == partner ? 1 : args.dims[axis];
  ctx.ParallelFor(planes, [&](int64_t plane) {
    const T* x = static_cast<const T*>(args.x);
    T* y = static_cast<T*>(args.y);
    for (int axis = inner - 1; axis >= 0; --axis) {
      if (axis == partner) continue;
      const int64_t i = plane % args.dims[axis];
      plane /= args.dims[axis];
      x += i * args.strides[axis];
      y += i * y_strides[axis];
    }
    TransposePlane(x, y, partner_dim, partner < 0 ? 0 : args.strides[partner],
                   partner < 0 ? 0 : y_strides[partner], args.dims[inner], args.strides[inner]);
  });
}

}  // namespace

KernelStatus Transpose(const KernelContext& ctx, const TransposeArgs& args) {
  if (ctx.ops != nullptr) return ctx.ops->transpose(ctx, args);
  if (ctx.arch != Arch::kCpu)
    return {KernelCode::kUnsupported, "Transpose: no kernels of the device"};
  if (args.rank < 1 || args.rank > kMaxTransposeRank) {
    return {KernelCode::kInvalidArgument, "Transpose: rank outside [1, kMaxTransposeRank]"};
  }
  for (int axis = 0; axis < args.rank; ++axis) {
    if (args.dims[axis] <= 0) return {};
  }
  const TransposeArgs merged = Merge(args);
  switch (args.element_bytes) {
    case 1:
      TransposeTyped<uint8_t>(ctx, merged);
      return {};
    case 2:
      TransposeTyped<uint16_t>(ctx, merged);
      return {};
    case 4:
      TransposeTyped<uint32_t>(ctx, merged);
      return {};
    case 8:
      TransposeTyped<uint64_t>(ctx, merged);
      return {};
    default:
      return {KernelCode::kInvalidArgument, "Transpose: elements are not 1, 2, 4 or 8 bytes"};
  }
}

}  // namespace espalier::kernels
