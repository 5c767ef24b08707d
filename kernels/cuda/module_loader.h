// module_loader.h — opens libespalier_cuda.so and checks that it belongs to this build.
#pragma once

#include <string>

#include "kernels/cuda/module.h"

namespace espalier::kernels::cuda {

// Whether this machine has NVIDIA's driver: asked before the module is opened, which maps hundreds of megabytes of
// libraries.
bool HasCudaDriver();

// Null with *error set (never empty) when the file is missing, cannot be linked, or has another ABI. The module stays
// open for the life of the process. `path` as dlopen takes it; an empty one means libespalier_cuda.so.
const CudaModule* OpenCudaModule(const std::string& path, std::string* error);

}  // namespace espalier::kernels::cuda
