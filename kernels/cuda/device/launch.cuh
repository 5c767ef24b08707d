// launch.cuh — a checked kernel launch.
#pragma once

#include <type_traits>

#include "kernels/cuda/launch.h"

namespace espalier::kernels::cuda {

// Launches on `stream` and reports a refused launch; with `overlap` the kernel may start while its predecessor still
// runs (it must call WaitForPredecessors before it touches x, y or scratch).
template <typename... Params>
KernelStatus Launch(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, void* stream, bool overlap,
                    const std::type_identity_t<Params>&... params) {
  if (KernelStatus status = AllowSharedMemory(reinterpret_cast<const void*>(kernel), shared_bytes); !status.ok()) {
    return status;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return FromCuda(cudaLaunchKernelEx(&config, kernel, params...));
}

}  // namespace espalier::kernels::cuda
