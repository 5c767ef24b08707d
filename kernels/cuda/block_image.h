// block_image.h — the form in which CUDA kernels read block_csr(br×bc) and diagonal(br×bc) weights.
//
// A weight is a list of PANELS of br rows and kc = min(bc, 64) columns; a block is bc / kc panels. Both layouts end in the
// same image, so one kernel serves both: a block-diagonal costs 16 bytes of index a panel, and a weight update may move
// an image without rebuilding anything that points into it.
//
//   section    type        order
//   rows       RowSpan[R]  most panels first, so that a persistent grid ends on its smallest tiles
//   panels     Panel[P]    by block row, then by column
//   values     2-byte      panel after panel, each br·kc values, SWIZZLED as the tensor memory engine would
//
// fp32 weights have the same sections with kc = min(bc, 32) and plain row-major panels: their kernel pads rows itself.
//
// Inside a panel, value (r, c) is at byte s ^ ((s >> 3) & mask), s = 2·(r·kc + c), mask = 2·kc − 16: the 16-byte chunks of
// a row are permuted so that eight rows' chunks lie in eight different bank groups.
//
// Everything here is plain C++ and runs on the host; the engine uploads the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/kernel_status.h"
#include "kernels/linear/linear.h"

namespace espalier::kernels::cuda {

struct RowSpan {
  int32_t row;    // block row
  int32_t begin;  // its panels are [begin, end)
  int32_t end;
  int32_t unused;
};

struct Panel {
  int32_t column;  // first column of W
  int32_t row;     // block row
  int32_t begin;   // panels of that block row: [begin, end)
  int32_t end;
};

constexpr int kImageAlignment = 1024;  // of sections; swizzle patterns repeat within it

constexpr int PanelColumns(int block_cols) { return block_cols < 64 ? block_cols : 64; }
constexpr int F32PanelColumns(int block_cols) { return block_cols < 32 ? block_cols : 32; }

// XOR mask of the swizzle for rows of `panel_columns` 2-byte values: 16 → 0x10, 32 → 0x30, 64 → 0x70.
constexpr int SwizzleMask(int panel_columns) { return panel_columns * 2 - 16; }

// Byte offset of the swizzled position of linear byte offset `s` in a panel (or in an x tile of the same width).
constexpr int Swizzled(int s, int mask) { return s ^ ((s >> 3) & mask); }

// Where the sections of an image lie, in bytes from its start.
struct BlockImage {
  int64_t block_rows_count = 0;  // R
  int64_t panels = 0;            // P
  int panel_columns = 0;         // kc
  size_t panel_bytes = 0;
  size_t rows_offset = 0, panels_offset = 0, values_offset = 0;
  size_t bytes = 0;
};

// From shape and count alone: the device side needs no host copy of the indices.
BlockImage BlockImageOf(const WeightView& weight);

// True when br and bc are in {16, 32, 64, 128}, values and x are of one 2-byte type and every index fits int32.
bool FitsBlockImage(const LinearDesc& desc);
// The same with fp32 values and x.
bool FitsF32BlockImage(const LinearDesc& desc);

// FitsBlockImage, blocks that block_linear_stream.cu is compiled for, and few tokens.
constexpr int kMaxStreamTokens = 32;
bool FitsBlockStream(const LinearDesc& desc);

// Byte of value (row, column) in a panel of `panel_columns` values of `dtype` a row.
constexpr int64_t ByteInPanel(DType dtype, int panel_columns, int64_t row, int64_t column) {
  const auto linear =
      static_cast<int>(static_cast<int64_t>(SizeOf(dtype)) * (row * panel_columns + column));
  return dtype == DType::kFloat32 ? linear : Swizzled(linear, SwizzleMask(panel_columns));
}

// Copies rows × columns 2-byte values at row stride `stride` into one panel, swizzled.
void CopyPanel(const uint16_t* block, int stride, int rows, int columns, uint16_t* panel);

size_t BlockImageBytes(const WeightView& weight);
KernelStatus PackBlockImage(const WeightView& weight, void* packed);
KernelStatus LocateInBlockImage(const WeightView& weight, std::span<const int64_t> elements,
                                int64_t* offsets);

}  // namespace espalier::kernels::cuda
