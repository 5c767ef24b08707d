// launch.h — what every launch needs: device facts asked once, tensor maps, shared-memory limits, error texts.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/kernel_status.h"
#include "kernels/linear/linear.h"

namespace espalier::kernels::cuda {

// Also clears an error that is not sticky.
KernelStatus FromCuda(cudaError_t error);

// Of the current device; asked of the driver once a device.
int MultiprocessorCount();

// How many clusters of `cluster` thread blocks with `shared_bytes` each the current device holds at a time; asked once a
// (kernel, device, cluster, bytes).
KernelStatus ActiveClusters(const void* kernel, int cluster, int threads, size_t shared_bytes,
                            int* count);

// Raises the dynamic shared memory limit of a kernel on the current device; once a (kernel, device).
KernelStatus AllowSharedMemory(const void* kernel, size_t bytes);

// Map of a row-major [rows, columns] matrix of 2-byte values, boxes of box_rows × box_columns swizzled over their row
// (16, 32 or 64 values). Needs base and row stride to be multiples of 16 bytes.
KernelStatus MakeTensorMap(CUtensorMap* map, DType dtype, const void* base, int64_t rows,
                           int64_t columns, int64_t row_stride, int box_rows, int box_columns);

// The contract that all kernels of this folder share: pointers present and 16-byte aligned, strides multiples of 8
// elements and at least the width, tokens within int32.
KernelStatus CheckArgs(const LinearArgs& args);

inline LinearDesc DescOfArgs(const LinearArgs& args) {
  const WeightView& w = args.weight;
  return {args.tokens,   w.out,        w.in,         w.layout, w.dtype,
          args.io_dtype, w.block_rows, w.block_cols, w.count};
}

}  // namespace espalier::kernels::cuda
