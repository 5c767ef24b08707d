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

// Throws std::bad_alloc; `weight` is block_csr or diagonal with valid indices.
BlockRows GroupByRow(const WeightView& weight);

// Finds the blocks of elements row · in + col that ascend.
class BlockFinder {
 public:
  // Both outlive it.
  BlockFinder(const WeightView& weight, const BlockRows& rows) : weight_(weight), rows_(rows) {}

  struct Place {
    int64_t entry;  // index into `entries` of the block that holds the element, −1 when none does
    int64_t row, col;  // of the element in the block
  };
  Place Find(int64_t element);

 private:
  const WeightView& weight_;
  const BlockRows& rows_;
  int64_t row_begin_ = 0, row_end_ = 0;  // elements of the row
  int64_t row_in_block_ = 0;
  int32_t next_ = 0, end_ = 0;  // entries of the row's blocks from the last one found on
};

}  // namespace espalier::kernels::cuda
