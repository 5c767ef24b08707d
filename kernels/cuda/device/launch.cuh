// launch.cuh — a checked kernel launch.
#pragma once

#include <type_traits>

#include "kernels/base/kernel_context.h"
#include "kernels/cuda/launch.h"

namespace espalier::kernels::cuda {

struct LaunchShape {
  dim3 grid;
  int threads = 0;
  size_t shared_bytes = 0;
  int cluster = 1;  // thread blocks a cluster, along x
  // The kernel may start while its predecessor on the stream still runs: it must call WaitForPredecessors before it
  // touches x, y or scratch.
  bool overlap = false;
};

// Launches on ctx.stream and reports a refused launch.
template <typename... Params>
KernelStatus Launch(const KernelContext& ctx, const LaunchShape& shape, void (*kernel)(Params...),
                    const std::type_identity_t<Params>&... params) {
  KernelStatus status =
      AllowSharedMemory(reinterpret_cast<const void*>(kernel), shape.shared_bytes);
  if (!status.ok()) return status;
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (shape.overlap) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(ctx.stream);
  config.attrs = attributes;
  config.numAttrs = count;
  return FromCuda(cudaLaunchKernelEx(&config, kernel, params...));
}

}  // namespace espalier::kernels::cuda
