// tile_walk.cuh — which tiles of a grid a persistent thread block computes.
#pragma once

#include <cstdint>

namespace espalier::kernels::cuda {

// Tile of this thread block in round `round`, or -1 after the last of `tiles`. Rounds go through the tiles forwards and
// backwards in turn: with the costliest rows first, the block that got the longest tile of one round gets the shortest
// of the next, without a ticket counter in memory.
__device__ __forceinline__ int TileOf(int round, int tiles) {
  const int64_t first = int64_t{round} * gridDim.x;
  const int64_t tile = first + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  return tile < tiles ? static_cast<int>(tile) : -1;
}

}  // namespace espalier::kernels::cuda
