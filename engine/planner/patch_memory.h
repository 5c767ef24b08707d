// patch_memory.h — single elements of weights and constants overwritten where they serve, on the CPU or on a GPU.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/tensor/cuda_device.h"
#include "kernels/element_patch/element_patch.h"

namespace espalier::planner {

// One thread's. On a GPU it keeps a stream of its own and room for the most patches that it was given so far: memory that
// comes and goes there waits for all that runs.
class MemoryPatcher {
 public:
  // For memory on `gpu`, which outlives it, or the host's when it is null.
  explicit MemoryPatcher(const CudaDevice* gpu) : gpu_(gpu) {}

  // Overwrites, reads back, and returns −1; or, when an element does not hold its old bits, writes nothing and returns
  // the index of the first such patch. Nothing else touches `memory` meanwhile. Internal when an element does not read
  // back.
  absl::StatusOr<int64_t> Patch(void* memory, int32_t width,
                                absl::Span<const kernels::ElementPatch> patches);

 private:
  absl::StatusOr<kernels::PatchResult> PatchOnGpu(kernels::PatchArgs args);

  const CudaDevice* const gpu_;
  CudaHandle stream_, patches_, result_;
};

}  // namespace espalier::planner
