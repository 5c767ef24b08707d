#include "kernels/cuda/block_image.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <vector>

#include "kernels/cuda/block_rows.h"

namespace espalier::kernels::cuda {
namespace {

size_t AlignUp(size_t bytes) {
  return (bytes + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
}

void PackPanels(const WeightView& weight, const BlockImage& image, const BlockRows& rows,
                Panel* panels, uint16_t* values) {
  const int kc = image.panel_columns, br = weight.block_rows, bc = weight.block_cols;
  const int splits = bc / kc;
  for (int64_t row = 0; row < image.block_rows_count; ++row) {
    const int32_t begin = rows.row_begin[row] * splits, end = rows.row_begin[row + 1] * splits;
    int64_t p = begin;
    for (int32_t i = rows.row_begin[row]; i < rows.row_begin[row + 1]; ++i) {
      const BlockEntry& entry = rows.entries[i];
      const uint16_t* block =
          static_cast<const uint16_t*>(weight.values) + int64_t{entry.block} * br * bc;
      for (int split = 0; split < splits; ++split, ++p) {
        panels[p] = {entry.column * bc + split * kc, static_cast<int32_t>(row), begin, end};
        CopyPanel(block + split * kc, bc, br, kc, values + p * br * kc);
      }
    }
  }
}

}  // namespace

void CopyPanel(const uint16_t* block, int stride, int rows, int columns, uint16_t* panel) {
  const int mask = SwizzleMask(columns);
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; c += 8) {
      const int s = 2 * (r * columns + c);
      std::memcpy(panel + Swizzled(s, mask) / 2, block + int64_t{r} * stride + c, 16);
    }
  }
}

BlockImage BlockImageOf(const WeightView& weight) {
  BlockImage image;
  image.block_rows_count = weight.block_row_count();
  image.panel_columns = PanelColumns(weight.block_cols);
  image.panels = StoredBlocks(weight) * (weight.block_cols / image.panel_columns);
  image.panel_bytes = size_t{2} * weight.block_rows * image.panel_columns;
  image.rows_offset = 0;
  image.panels_offset = AlignUp(image.block_rows_count * sizeof(RowSpan));
  image.values_offset = image.panels_offset + AlignUp(image.panels * sizeof(Panel));
  image.bytes = image.values_offset + AlignUp(image.panels * image.panel_bytes);
  return image;
}

bool FitsBlockImage(const LinearDesc& desc) {
  const auto is_side = [](int32_t side) {
    return side == 16 || side == 32 || side == 64 || side == 128;
  };
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max() / 4;
  if (desc.layout != Layout::kBlockCsr && desc.layout != Layout::kDiagonal) return false;
  if (desc.weight_dtype != DType::kBFloat16 && desc.weight_dtype != DType::kFloat16) return false;
  if (desc.io_dtype != desc.weight_dtype) return false;
  if (!is_side(desc.block_rows) || !is_side(desc.block_cols)) return false;
  if (desc.in < 1 || desc.out < 1 || desc.in > kLimit || desc.out > kLimit) return false;
  const int64_t R = (desc.out + desc.block_rows - 1) / desc.block_rows;
  const int64_t C = (desc.in + desc.block_cols - 1) / desc.block_cols;
  return desc.count >= 0 && desc.count <= kLimit &&
         (desc.layout == Layout::kBlockCsr || desc.count <= kLimit / std::min(R, C));
}

bool FitsBlockStream(const LinearDesc& desc) {
  if (!FitsBlockImage(desc) || desc.tokens > kMaxStreamTokens) return false;
  if (desc.block_rows >= 64) return desc.block_cols >= 64;
  return desc.block_rows == desc.block_cols;
}

size_t BlockImageBytes(const WeightView& weight) { return BlockImageOf(weight).bytes; }

KernelStatus PackBlockImage(const WeightView& weight, void* packed) {
  if (!FitsBlockImage({0, weight.out, weight.in, weight.layout, weight.dtype, weight.dtype,
                       weight.block_rows, weight.block_cols, weight.count})) {
    return {KernelCode::kUnsupported,
            "block image: needs 2-byte blocks with sides 16, 32, 64, 128"};
  }
  const BlockImage image = BlockImageOf(weight);
  char* base = static_cast<char*>(packed);
  try {
    const BlockRows rows = GroupByRow(weight);
    std::memset(base, 0, image.values_offset);
    PackPanels(weight, image, rows, reinterpret_cast<Panel*>(base + image.panels_offset),
               reinterpret_cast<uint16_t*>(base + image.values_offset));
    std::vector<int32_t> order(image.block_rows_count);
    std::iota(order.begin(), order.end(), 0);
    const auto length = [&](int32_t r) { return rows.row_begin[r + 1] - rows.row_begin[r]; };
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return length(a) > length(b); });
    const int splits = weight.block_cols / image.panel_columns;
    RowSpan* spans = reinterpret_cast<RowSpan*>(base + image.rows_offset);
    for (int32_t row : order) {
      *spans++ = {row, rows.row_begin[row] * splits, rows.row_begin[row + 1] * splits, 0};
    }
  } catch (const std::bad_alloc&) {
    return {KernelCode::kOutOfMemory, "block image: no host memory for the row lists"};
  }
  return {};
}

}  // namespace espalier::kernels::cuda
