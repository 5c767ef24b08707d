// row_group_image.h — narrow blocks (br = 16 or 32), gathered so that several block rows share each slab of x.
//
// A block of 16 or 32 rows alone re-reads x from L2 so often that L2 is the roof. Here 256 / br neighbouring block rows
// form a GROUP that one thread block computes together: it walks the columns that any of them uses, in STEPS of a few
// x slabs and the panels (block_image.h) that multiply them. At 90 % sparsity 16 rows of 16 touch 81 % of the columns
// instead of 16 × 10 %, half the traffic.
//
//   section  type           order
//   groups   GroupSpan[N]   most steps first
//   values   2-byte panels  by group, step, row in the group, column
//   steps    Step[S]        by group; last, because S is known only after packing
//
// Panels are swizzled and row-permuted as in block_image.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/block_image.h"

namespace espalier::kernels::cuda {

constexpr int kGroupOutputs = 256;  // rows of W a group covers: 64 tokens × 256 outputs = 128 accumulators a thread
constexpr int kMaxGroupRows = kGroupOutputs / 16;
constexpr int kMaxStepSlabs = 8;
constexpr int kMaxStepPanels = 64;  // and one more is read ahead: StepPanels stays below

constexpr int GroupRows(int block_rows) { return kGroupOutputs / block_rows; }
// 32 KiB of x (128 tokens) and 16 KiB of weights a step: four stages in shared memory.
constexpr int StepSlabs(int panel_columns) { return 128 / panel_columns; }
constexpr int StepPanels(int block_rows, int panel_columns) {
  return 16 * 1024 / (2 * block_rows * panel_columns);
}

struct GroupSpan {
  int32_t group;
  int32_t begin;  // its steps are [begin, end)
  int32_t end;
  int32_t unused;
};

// Copied to shared memory with its slabs and panels by one bulk copy, so that its size is part of the design.
struct Step {
  int32_t slabs;
  int32_t panels;
  int64_t first_panel;
  int32_t column[kMaxStepSlabs];   // first column of slab i
  uint8_t row_end[kMaxGroupRows];  // panels of row g end here and begin where those of row g - 1 end
  uint8_t slab[kMaxStepPanels];    // slab that panel i multiplies
};
static_assert(sizeof(Step) == 128);

struct RowGroupImage {
  int64_t groups = 0;
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

}  // namespace espalier::kernels::cuda
