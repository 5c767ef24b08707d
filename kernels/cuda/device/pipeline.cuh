// pipeline.cuh — a ring of shared-memory stages between one producing warp and the consuming warps, on mbarriers.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/ptx.cuh"

namespace espalier::kernels::cuda {

// Barriers of a ring: stage s is full at `full + 8s`, empty at `empty + 8s`.
struct RingBarriers {
  uint32_t full, empty;  // shared-memory addresses

  __device__ __forceinline__ uint32_t Full(int stage) const { return full + 8 * stage; }
  __device__ __forceinline__ uint32_t Empty(int stage) const { return empty + 8 * stage; }
};

// Called by one thread before a __syncthreads. A stage is full after an expecting arrival of each producer and their bytes,
// empty after `arrivals` of the consumers.
__device__ __forceinline__ void InitRing(RingBarriers barriers, int stages, int arrivals,
                                         int producers = 1) {
  for (int s = 0; s < stages; ++s) {
    InitBarrier(barriers.Full(s), producers);
    InitBarrier(barriers.Empty(s), arrivals);
  }
  FenceBarrierInit();
}

// A position in the ring. Consumers wait for `parity` of the full barrier, the producer for `parity ^ 1` of the empty one.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  // `in_use` of the stages, the same on both sides.
  __device__ __forceinline__ void Advance(int in_use = kStages) {
    if (++stage == in_use) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace espalier::kernels::cuda
