// op_table.h — what a GPU runs besides linear layers: one function an op, beside the linear kernels in the module's table.
//
//   convert     y[r, c] = x[r, c] as `to`, through `through` (a Cast to a narrower type of a wider value)
//   the others  as kernels/elementwise, kernels/softmax, kernels/layer_norm, kernels/transpose, kernels/element_patch and
//               kernels/linear_pair say; those functions come here when KernelContext::ops is set
//
// Shapes   x, y: [rows, columns], row strides in ELEMENTS; what lies between columns and stride is not touched.
// Types    convert: every pair of numeric types; `through` is one of them, or f16 or bf16 on the way to a float. Float to float and integer to float round to nearest-even; float to
//          integer truncates towards zero and saturates, NaN gives 0; integer to integer wraps.
// Memory   Everything on the device, borrowed. y may be exactly x where the op allows it on the CPU; convert: no overlap.
// Limits   rows, columns >= 0 (0 is a no-op).
// Async    Enqueued on ctx.stream. Thread-safe: no shared state.
// Determinism  Every element, or row of a reduction, depends on its own inputs only: bit-identical whatever the batch.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/kernel_context.h"
#include "kernels/base/kernel_status.h"

namespace espalier::kernels {
struct ActivateArgs;
struct BinaryArgs;
struct LayerNormArgs;
struct LinearPairArgs;
struct PatchArgs;
struct SoftmaxArgs;
struct TransposeArgs;
}  // namespace espalier::kernels

namespace espalier::kernels::cuda {

struct ConvertArgs {
  DType from = DType::kFloat32, through = DType::kFloat32, to = DType::kFloat32;
  const void* x = nullptr;
  void* y = nullptr;
  int64_t rows = 0, columns = 0;
  int64_t x_stride = 0, y_stride = 0;
};

struct OpTable {
  KernelStatus (*convert)(const KernelContext&, const ConvertArgs&);
  KernelStatus (*activate)(const KernelContext&, const ActivateArgs&);
  KernelStatus (*binary)(const KernelContext&, const BinaryArgs&);
  KernelStatus (*softmax)(const KernelContext&, const SoftmaxArgs&);
  KernelStatus (*layer_norm)(const KernelContext&, const LayerNormArgs&);
  KernelStatus (*transpose)(const KernelContext&, const TransposeArgs&);
  KernelStatus (*patch)(const KernelContext&, const PatchArgs&);
  KernelStatus (*linear_pair)(const KernelContext&, const LinearPairArgs&);
};

}  // namespace espalier::kernels::cuda
