// linear.h — y = act(x · Wᵀ + b + residual), one description for every layout, and the list of kernels that compute it.
//
// Shapes   x: [tokens, in], row stride x_stride; y: [tokens, out], row stride y_stride (strides in ELEMENTS);
//          bias: [out] f32 or null; residual: [tokens, out], row stride residual_stride, or null; W: see weight_view.h.
// Types    x, residual and y of io_dtype. CPU: io f32, weight values f32, bf16 or f16. CUDA: io and weight values of one
//          type (bf16, f16 or f32). Accumulation f32 everywhere; bias f32. y is rounded once (dense_matmul.h says where the
//          library's kernel does not).
// Memory   Everything is borrowed. y must not alias x or scratch. residual may be y itself (the same pointer and stride):
//          an element is read before it is written, by whoever writes it; else the two share no element. It may be x.
//          Kernels allocate nothing: `scratch` holds scratch_bytes(desc, threads) bytes, 64-byte aligned, contents undefined.
// Limits   tokens >= 0 (0 is a no-op); in, out >= 1.
// Errors   kUnsupported when supports() is false for the problem, kInvalidArgument for a broken contract.
// Async    CPU: returns when y is written. CUDA: enqueued on ctx.stream. Thread-safe: no shared state.
// Determinism  Same variant, weight, x row and residual row => bit-identical y row where `batch_invariant`, whatever tokens and
//          threads are; otherwise the same for the same tokens and threads.
//
// A kernel family is a folder kernels/<layout>_linear/ with a variants.inc: one line a variant, best first. The list
// here includes them all, so a new variant is one line there and its functions; tests and benches are generated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/activation.h"
#include "kernels/base/kernel_context.h"
#include "kernels/base/kernel_status.h"
#include "kernels/linear/weight_view.h"

namespace espalier::kernels {

// The problem, without data: what selection and planning look at. Printable with ToString (engine side).
struct LinearDesc {
  int64_t tokens = 0;
  int64_t out = 0;
  int64_t in = 0;
  Layout layout = Layout::kDense;
  DType weight_dtype = DType::kFloat32;
  DType io_dtype = DType::kFloat32;
  int32_t block_rows = 1;
  int32_t block_cols = 1;
  int64_t count = 0;  // as WeightView::count
};

LinearDesc DescOf(const WeightView& weight, int64_t tokens, DType io_dtype = DType::kFloat32);

struct LinearArgs {
  WeightView weight;
  DType io_dtype = DType::kFloat32;  // of x, residual and y
  const void* x = nullptr;
  int64_t x_stride = 0;
  void* y = nullptr;
  int64_t y_stride = 0;
  const float* bias = nullptr;
  const void* residual = nullptr;
  int64_t residual_stride = 0;
  Activation activation = Activation::kNone;
  int64_t tokens = 0;
  void* scratch = nullptr;
};

// One kernel: plain functions, so that a module can export the same table through a C ABI.
struct LinearVariant {
  const char* name;  // op_dtype_arch_trait, e.g. "diagonal_linear_f32_cpu_lanes"
  Layout layout;
  Arch arch;
  bool batch_invariant;
  bool (*supports)(const LinearDesc&);
  // Variants with the same non-null `packing` name read the same packed bytes. Null: reads WeightView's arrays as they
  // are. A packed variant still reads row_ptr, col_idx and offsets, but not `values`, which the owner may free.
  const char* packing;
  size_t (*packed_bytes)(const WeightView&);
  // Host memory to host memory, also for CUDA variants (the engine uploads); `packed` is 64-byte aligned.
  KernelStatus (*pack)(const WeightView&, void* packed);
  // Where elements lie, so that they can be changed in place: offsets[i] becomes the byte of element
  // elements[i] = row · in + col in the packed form (without one: in `values`), −1 where it is not stored. `elements`
  // ascend; values are not read. Null: an element of this packing may lie in several places.
  KernelStatus (*locate)(const WeightView&, std::span<const int64_t> elements, int64_t* offsets);
  size_t (*scratch_bytes)(const LinearDesc&, int threads);
  KernelStatus (*run)(const KernelContext&, const LinearArgs&);
};

// Every variant that is compiled in, best first within a layout.
std::span<const LinearVariant> LinearVariants();

// Null when there is none of that name: a plan cache from another build may name one that is gone.
const LinearVariant* FindLinearVariantOrNull(const char* name);

// The oracle: the obvious loop in double over the stored values, y in double [tokens, out] contiguous.
// `magnitude` (may be null, [tokens, out]) receives Σ|x·w| + |b| + |residual|, from which a test derives its tolerance.
void ReferenceLinear(const LinearArgs& args, double* y, double* magnitude);

}  // namespace espalier::kernels
