// row_group_image.h — narrow blocks (br = 16 or 32), gathered so that many block rows share each slab of x.
//
// A block of 16 or 32 rows alone re-reads x from L2 so often that L2 is the roof. Here 256 outputs, 256 / br neighbouring
// block rows, are computed together: the columns that any of them uses are walked in STEPS of a few slabs of x.
//   br = 32   a GROUP is 256 outputs. At 90 % sparsity its 8 rows use 57 % of the columns instead of 8 × 10 %.
//   br = 16   a group is 512 outputs in two HALVES, for the two thread blocks of a cluster that share each slab. Its 32
//             rows use nearly every column instead of 32 × 10 %.
//
//   section  type           order
//   groups   GroupSpan[N]   most steps first
//   values   2-byte panels  by group, step, half, row in the half, column
//   steps    Step[S·halves] by group; one a half of the group; last, because S is known only after packing
//
// Panels are swizzled as in block_image.h. A slab is at least 32 columns wide (L2 serves narrower rows at half speed), so
// with 16-column panels it holds two of them side by side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cuda/block_image.h"

namespace espalier::kernels::cuda {

constexpr int kGroupTokens = 128;  // that a cluster multiplies at a time: rows of a slab
constexpr int kHalfOutputs = 256;  // of one thread block
constexpr int Halves(int block_rows) { return block_rows == 16 ? 2 : 1; }
constexpr int kMaxHalfRows = kHalfOutputs / 16;
constexpr int kMaxStepSlabs = 6;
constexpr int kMaxStepPanels = 32;

constexpr int HalfRows(int block_rows) { return kHalfOutputs / block_rows; }
constexpr int SlabColumns(int panel_columns) { return panel_columns < 32 ? 32 : panel_columns; }
constexpr int SlabBytes(int panel_columns) { return kGroupTokens * SlabColumns(panel_columns) * 2; }
// 48 KiB of x and at most 16 KiB of weights a step: three stages in shared memory.
constexpr int StepSlabs(int panel_columns) { return 48 * 1024 / SlabBytes(panel_columns); }
constexpr int StepPanels(int block_rows, int panel_columns) {
  return 16 * 1024 / (2 * block_rows * panel_columns);
}

struct GroupSpan {
  int32_t group;
  int32_t begin;  // its steps are [begin, end), of which half h is Step s · halves + h
  int32_t end;
  int32_t unused;
};

// Copied to shared memory with its slabs and panels by one bulk copy, so that its size is part of the design.
struct Step {
  int32_t slabs;
  int32_t panels;  // of this half; may be 0
  int64_t first_panel;
  int32_t column[kMaxStepSlabs];  // first column of slab i; the same in both halves
  uint16_t x_offset[kMaxStepPanels +
                    4];  // where panel i's columns start in the slabs, in units of 16 bytes
  uint8_t row_end[kMaxHalfRows];  // panels of row g end here and begin where those of row g - 1 end
};
static_assert(sizeof(Step) == 128);

struct RowGroupImage {
  int64_t groups = 0;
  int halves = 0;
  int64_t panels = 0;
  int panel_columns = 0;
  size_t panel_bytes = 0;
  size_t values_offset = 0, steps_offset = 0;  // groups are at 0
};

RowGroupImage RowGroupImageOf(const WeightView& weight);

// FitsBlockImage and br in {16, 32}.
bool FitsRowGroupImage(const LinearDesc& desc);

size_t RowGroupImageBytes(const WeightView& weight);
KernelStatus PackRowGroupImage(const WeightView& weight, void* packed);
KernelStatus LocateInRowGroupImage(const WeightView& weight, std::span<const int64_t> elements,
                                   int64_t* offsets);

}  // namespace espalier::kernels::cuda
