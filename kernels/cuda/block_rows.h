// block_rows.h — the blocks of a block_csr or diagonal weight as one list per block row, columns ascending.
//
// What packers read: a block-diagonal names its blocks by (offset, position), kernels want them by row.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/linear/weight_view.h"

namespace espalier::kernels::cuda {

struct BlockEntry {
  int32_t column;  // block column
  int32_t block;   // index into values, in blocks
};

struct BlockRows {
  std::vector<int32_t> row_begin;   // [R + 1]
  std::vector<BlockEntry> entries;  // [blocks]
};

// Stored blocks: count for block_csr, K·D for a diagonal.
int64_t StoredBlocks(const WeightView& weight);

// Index into `entries` of the block that holds element row · in + col, −1 when none does.
int64_t FindEntry(const WeightView& weight, const BlockRows& rows, int64_t element);

// Throws std::bad_alloc; `weight` is block_csr or diagonal with valid indices.
BlockRows GroupByRow(const WeightView& weight);

}  // namespace espalier::kernels::cuda
