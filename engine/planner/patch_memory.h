// patch_memory.h — single elements of weights and constants overwritten where they serve, on the CPU or on a GPU.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/tensor/cuda_device.h"
#include "kernels/element_patch/element_patch.h"

namespace espalier::planner {

// Overwrites, reads back, and returns −1; or, when an element does not hold its old bits, writes nothing and returns the
// index of the first such patch. `memory` is on `gpu`, or the host's when it is null; nothing else touches it meanwhile.
// Internal when an element does not read back.
absl::StatusOr<int64_t> PatchMemory(const CudaDevice* gpu, void* memory, int32_t width,
                                    absl::Span<const kernels::ElementPatch> patches);

}  // namespace espalier::planner
