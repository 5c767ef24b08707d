// linear_pair_shape.h — which tiles of tokens a fused pair of layers is computed in, and what a multiprocessor holds of it.
//
// A thread block keeps x of a tile, a ring of weight panels for each of its three multiplying warpgroups, a few chunks of
// one hidden panel a warpgroup and a staged panel of y a warpgroup in shared memory, and y of the tile in registers:
//
//   tokens · 64-column panels of 128 · tokens bytes:  x ⌈in / 64⌉,  hidden 3 · 3,  y staged 3
//   accumulators                                      tokens / 2 registers a thread for each of ⌈⌈out / 64⌉ / 3⌉ block rows
//
// so that wide layers get narrow tiles. Everything here is plain C++.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/linear/linear.h"

namespace espalier::kernels::cuda {

constexpr int kPairPanelBytes = 64 * 128;  // 64 rows × 64 columns of two bytes
constexpr int kPairSharedBytes = 227 * 1024;
constexpr int kPairMostStages = 8, kPairLeastStages = 2;  // of a ring

constexpr int kPairWarpgroups = 3;  // that multiply
constexpr int kPairChunks = 3;      // of hidden panels, a panel a warpgroup, between the layers
constexpr int kPairLag = 2;         // chunks that the second layer is behind the first

struct PairTile {
  int tokens;    // the narrow side of wgmma
  int out_rows;  // block rows of y that a warpgroup has accumulators for, at most 10
};
// Widest first. 96 accumulators of y, 24 of a hidden panel and its 24 activated values fit the 160 registers of a thread.
constexpr PairTile kPairTiles[] = {{48, 4}, {32, 6}, {16, 8}};

struct PairShape {
  int in_panels, hidden_panels, out_rows;  // of 64
  int64_t panels1, panels2;                // stored
};

constexpr int PairChunks(const PairShape& shape) {
  return (shape.hidden_panels + kPairWarpgroups - 1) / kPairWarpgroups;
}

// Bytes of shared memory beside the rings: panels, barriers, tables (linear_pair.cu), alignment.
constexpr size_t PairFixedBytes(const PairTile& tile, const PairShape& shape) {
  const size_t panel = size_t{128} * tile.tokens;
  return panel * (shape.in_panels + (kPairChunks + 1) * kPairWarpgroups) +
         16 * kPairWarpgroups * kPairMostStages + 8 * (2 + 2 * kPairChunks) +
         4 * kPairWarpgroups * PairChunks(shape) + 2 * (shape.panels1 + shape.hidden_panels + 1) +
         1024;
}

// Stages of each ring, 0: the tile does not fit.
constexpr int PairStages(const PairTile& tile, const PairShape& shape) {
  const size_t fixed = PairFixedBytes(tile, shape);
  if (shape.out_rows > kPairWarpgroups * tile.out_rows || fixed > kPairSharedBytes) return 0;
  const auto stages =
      static_cast<int>((kPairSharedBytes - fixed) / (kPairWarpgroups * kPairPanelBytes));
  return stages < kPairLeastStages ? 0 : stages < kPairMostStages ? stages : kPairMostStages;
}

PairShape PairShapeOf(const WeightView& first, const WeightView& second);

}  // namespace espalier::kernels::cuda
