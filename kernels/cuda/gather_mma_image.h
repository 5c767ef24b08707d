// gather_mma_image.h — scattered weights, diagonal(1) and csr of 2-byte values, for sparse mma.sync with x in shared memory.
//
// A product m16n8k32 whose weights are two 16×16 PERMUTATIONS side by side: row j of the result takes one value of x from
// each half, whichever ldmatrix was told to fetch for it. So an instruction does 2 · 16 · 8 useful products, of two
// entries (diagonals, or non-zeros) of 16 rows, and x is read from shared memory 16 bytes, eight tokens, at a time.
// Weights of products with even numbers stand on the diagonal of their halves (k = j), of odd ones four off (k = j ^ 4):
// together they occupy every lane of the fragment once.
//
// With lane (g = lane / 4, q = lane % 4): a lane's values belong to row 8 · (q / 2) + g of 16, and to the products whose
// number is (q ^ g / 4) mod 2, mod 2. Tiles, starts and positions are as gather_image.h has them.
//
//   diagonal  tile: 64 rows. Unit: four diagonals, 16 bytes a lane: word u holds two diagonals' values in rows 16u … of the
//             lane's row; its low half is the even one's. Starts: of diagonals 0, 2, 1, 3.
//   csr       tile: 16 rows, those at [16 · tile, …) of section `rows`: in windows of 64 rows, four tiles, the longer come
//             first, so that little is filled up. A window at the end has all its tiles, empty ones too. Unit: eight non-zeros of a row, four products: 8 bytes of values a lane, then 8 bytes of
//             positions a lane: lane 16h + k fetches entry 2m + h of row k (k ^ 4 for odd m) for product m. The order of a
//             row's non-zeros is chosen so that eight rows fetched together lie in different banks.
//
//   section  type                 order
//   tiles    int32 [N + 1]        units of tile t are [tiles[t], tiles[t + 1])
//   starts   uint16 [N·⌈K/4⌉][4]   diagonal only, by unit; room for every diagonal in every tile
//   rows     int32 [N][16]        csr only; `out` where there is no row
//   units    512 bytes            last
#pragma once

#include "kernels/cuda/gather_image.h"

namespace espalier::kernels::cuda {

constexpr int kMmaTokens = 8;       // a position of x holds
constexpr int kMmaGroupRows = 16;   // rows of a product
constexpr int kMmaCsrEntries = 8;   // non-zeros of a row in a unit
constexpr int kMmaWindowRows = 64;  // rows sorted by length
constexpr int64_t kMostMmaPositions = 13'440, kMostMmaStreamPositions = 11'200;

GatherImage GatherMmaImageOf(const WeightView& weight);

// Layout csr, or diagonal with 1×1 blocks; values and x of one 2-byte type; x of eight tokens fits shared memory (beside
// the sums that thread blocks exchange where `shares`).
bool FitsGatherMmaImage(const LinearDesc& desc, bool shares);

size_t GatherMmaImageBytes(const WeightView& weight);
KernelStatus PackGatherMmaImage(const WeightView& weight, void* packed);
KernelStatus LocateInGatherMmaImage(const WeightView& weight, std::span<const int64_t> elements,
                                    int64_t* offsets);

}  // namespace espalier::kernels::cuda
