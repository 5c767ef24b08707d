// tile_walk.cuh — which tiles of a grid a persistent thread block or cluster computes.
#pragma once

#include <cstdint>

namespace espalier::kernels::cuda {

// Tile of worker `worker` (of `workers` thread blocks or clusters) in round `round`, or -1 after the last of `tiles`. Rounds
// go through the tiles forwards and backwards in turn: with the costliest rows first, the worker that got the longest tile
// of one round gets the shortest of the next, without a ticket counter in memory.
__device__ __forceinline__ int TileOf(int round, int tiles, int worker, int workers) {
  const int64_t first = int64_t{round} * workers;
  const int64_t tile = first + (round % 2 == 0 ? worker : workers - 1 - worker);
  return tile < tiles ? static_cast<int>(tile) : -1;
}

}  // namespace espalier::kernels::cuda
