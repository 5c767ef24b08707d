// gather_image.h — scattered weights, diagonal(1) and csr, re-tiled for kernels that keep x in shared memory.
//
// Rows are cut into TILES; a tile is a list of UNITS of 512 bytes, 16 a lane, so that a warp reads a unit with one load.
//
//   csr       tile: 32 rows, one a lane. Unit: four non-zeros of every row; a lane's 16 bytes are four 16-bit positions and
//             their four values (4 bytes a stored value: no wider than csr). Shorter rows are filled up.
//   diagonal  tile: 64 rows, rows l and l + 32 a lane. Unit: four diagonals; word d holds the values of diagonal d in both
//             rows. Along a diagonal the column grows with the row, so one START per diagonal serves the tile: row j meets
//             position start + j. Diagonals that miss a tile of a tall layer are left out.
//   fp32      a lane's 16 bytes are four values: of one row in both layouts, so that a diagonal tile has 32 rows too. The
//             positions of csr follow, 8 bytes a lane: 768 bytes a unit.
//
// Positions are those of x EXTENDED: position i < wrapped is column i mod modulus (zero where that is >= in), so that
// diagonals need not wrap; the positions from `wrapped` on are zeros, for values that are filled up: 0 · x must not be
// NaN where x is not finite.
//
//   section  type               order
//   tiles    int32 [N + 1]      units of tile t are [tiles[t], tiles[t + 1])
//   starts   uint16 [N·⌈K/4⌉][4]  diagonal only, by unit; room for every diagonal in every tile
//   units    512 or 768 bytes   last: their number is known only after packing
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/kernel_status.h"
#include "kernels/linear/linear.h"

namespace espalier::kernels::cuda {

constexpr int kUnitEntries = 4;  // diagonals, or non-zeros of a row
constexpr int kDiagonalTileRows = 64;
constexpr int kCsrTileRows = 32;
constexpr int kUnitBytes = 512;
constexpr int kF32CsrUnitBytes = 768;

struct GatherImage {
  int64_t tiles = 0;
  int tile_rows = 0;
  int unit_bytes = 0;
  int64_t modulus = 0;                         // csr: in; diagonal: max(out, in)
  int64_t wrapped = 0;                         // csr: in; diagonal: modulus + 64
  int64_t positions = 0;                       // all, the zeros included
  size_t starts_offset = 0, units_offset = 0;  // tiles are at 0
};

GatherImage GatherImageOf(const WeightView& weight);

// Layout csr, or diagonal with 1×1 blocks; values and x of one type; positions of x fit 16 bits, and one token of x fits
// shared memory.
bool FitsGatherImage(const LinearDesc& desc);

size_t GatherImageBytes(const WeightView& weight);
KernelStatus PackGatherImage(const WeightView& weight, void* packed);
KernelStatus LocateInGatherImage(const WeightView& weight, std::span<const int64_t> elements,
                                 int64_t* offsets);

}  // namespace espalier::kernels::cuda
