// expand_image.h — scattered weights, diagonal(1) and csr, as 64×64 tiles of (position, value) entries.
//
// Tensor cores want dense tiles. A kernel stores a tile's few entries into shared memory that is otherwise zero, multiplies
// the tile as if it were dense, and takes them out again: the weight travels compressed (4 bytes a non-zero), and at 90 %
// sparsity 13 stores a warp make 4,096 products.
//
//   section   type                      order
//   tiles     int32 [R·C + 1]           R = ⌈out/64⌉ rows of C = ⌈in/64⌉ tiles; quads of tile i: [tiles[i], tiles[i + 1])
//   quads     4 entries, 16 bytes each  an entry: value (low half), byte in the tile (high half)
//
// The byte is that of value (r, c) of the tile as an 8 KiB matrix operand with rows of 128 bytes, SWIZZLED as in
// block_image.h. Entry j of a thread's quad is stored together with those of the 31 other threads of its warp: entries are
// dealt out so that the 32 of a store lie in as many of the 32 banks as there are. A last quad is filled up with its own
// last entry.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/kernel_status.h"
#include "kernels/linear/linear.h"

namespace espalier::kernels::cuda {

constexpr int kExpandSide = 64;
constexpr int kExpandTileBytes = kExpandSide * kExpandSide * 2;
constexpr int kQuadEntries = 4;

struct ExpandImage {
  int64_t row_tiles = 0, column_tiles = 0;  // R, C
  size_t quads_offset = 0;                  // tiles are at 0
};

ExpandImage ExpandImageOf(const WeightView& weight);

// Layout csr, or diagonal with 1×1 blocks; 2-byte values and x; indices fit int32.
bool FitsExpandImage(const LinearDesc& desc);

size_t ExpandImageBytes(const WeightView& weight);
KernelStatus PackExpandImage(const WeightView& weight, void* packed);

// How many thread blocks, a cluster, share the columns of a row of tiles, and how many rows of tiles a thread block has.
struct ExpandCut {
  int splits = 1, row_tiles = 1;
};
// How many clusters of 1, 2, 4 and 8 thread blocks the device holds at a time.
struct ExpandClusters {
  std::array<int, 4> active;
};
// The cut that keeps the device busiest: `splits` follows from the shape alone, so that a token's sums do not depend on how
// many others there are.
ExpandCut CutExpandTiles(const ExpandImage& image, int64_t tokens, int tile_tokens,
                         int most_row_tiles, const ExpandClusters& clusters);

}  // namespace espalier::kernels::cuda
