// variants.h — the CUDA variants as the host knows them: data and packing without CUDA, execution through the module.
//
// The list is complete on every machine, so that selection for a GPU is testable where there is none; `run` answers
// kUnsupported until UseCudaModule has been called.
#pragma once

#include <span>

#include "kernels/base/kernel_context.h"
#include "kernels/cuda/module.h"
#include "kernels/linear/linear.h"

namespace espalier::kernels::cuda {

// Best first within a layout.
std::span<const LinearVariant> CudaLinearVariants();

// Which kernel of the module a variant of this list runs; kCount for any other.
CudaKernel KernelOf(const LinearVariant& variant);

// The architecture whose variants a device runs; kCpu for one that is too old. Passing kSm80 for a newer device is how
// the portable path is forced.
Arch ArchOf(const CudaDeviceInfo& device);

// sm_80 code runs on sm_90, not the other way round.
bool RunsOn(const LinearVariant& variant, Arch device_arch);

// From now on `run` of the list goes through `module`, which must outlive every call.
void UseCudaModule(const CudaModule* module);

}  // namespace espalier::kernels::cuda
