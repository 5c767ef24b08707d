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

// copy(block, stride, rows, columns, panel), as CopyPanel, for values of type Value.
template <typename Value, typename Copy>
void PackPanels(const WeightView& weight, const BlockImage& image, const BlockRows& rows,
                Panel* panels, Value* values, Copy copy) {
  const int kc = image.panel_columns, br = weight.block_rows, bc = weight.block_cols;
  const int splits = bc / kc;
  for (int64_t row = 0; row < image.block_rows_count; ++row) {
    const int32_t begin = rows.row_begin[row] * splits, end = rows.row_begin[row + 1] * splits;
    int64_t p = begin;
    for (int32_t i = rows.row_begin[row]; i < rows.row_begin[row + 1]; ++i) {
      const BlockEntry& entry = rows.entries[i];
      const Value* block =
          static_cast<const Value*>(weight.values) + int64_t{entry.block} * br * bc;
      for (int split = 0; split < splits; ++split, ++p) {
        panels[p] = {entry.column * bc + split * kc, static_cast<int32_t>(row), begin, end};
        copy(block + split * kc, bc, br, kc, values + p * br * kc);
      }
    }
  }
}

void CopyF32Panel(const float* block, int stride, int rows, int columns, float* panel) {
  for (int r = 0; r < rows; ++r)
    std::copy_n(block + int64_t{r} * stride, columns, panel + r * columns);
}

// Everything but the type.
bool FitsSides(const LinearDesc& desc) {
  const auto is_side = [](int32_t side) {
    return side == 16 || side == 32 || side == 64 || side == 128;
  };
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max() / 4;
  if (desc.layout != Layout::kBlockCsr && desc.layout != Layout::kDiagonal) return false;
  if (desc.io_dtype != desc.weight_dtype) return false;
  if (!is_side(desc.block_rows) || !is_side(desc.block_cols)) return false;
  if (desc.in < 1 || desc.out < 1 || desc.in > kLimit || desc.out > kLimit) return false;
  const int64_t R = (desc.out + desc.block_rows - 1) / desc.block_rows;
  const int64_t C = (desc.in + desc.block_cols - 1) / desc.block_cols;
  return desc.count >= 0 && desc.count <= kLimit &&
         (desc.layout == Layout::kBlockCsr || desc.count <= kLimit / std::min(R, C));
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
  const bool is_f32 = weight.dtype == DType::kFloat32;
  image.panel_columns =
      is_f32 ? F32PanelColumns(weight.block_cols) : PanelColumns(weight.block_cols);
  image.panels = StoredBlocks(weight) * (weight.block_cols / image.panel_columns);
  image.panel_bytes = SizeOf(weight.dtype) * weight.block_rows * image.panel_columns;
  image.rows_offset = 0;
  image.panels_offset = AlignUp(image.block_rows_count * sizeof(RowSpan));
  image.values_offset = image.panels_offset + AlignUp(image.panels * sizeof(Panel));
  image.bytes = image.values_offset + AlignUp(image.panels * image.panel_bytes);
  return image;
}

bool FitsBlockImage(const LinearDesc& desc) {
  return (desc.weight_dtype == DType::kBFloat16 || desc.weight_dtype == DType::kFloat16) &&
         FitsSides(desc);
}

bool FitsF32BlockImage(const LinearDesc& desc) {
  return desc.weight_dtype == DType::kFloat32 && FitsSides(desc);
}

bool FitsBlockStream(const LinearDesc& desc) {
  if (!FitsBlockImage(desc) || desc.tokens > kMaxStreamTokens) return false;
  if (desc.block_rows >= 64) return desc.block_cols >= 64;
  return desc.block_rows == desc.block_cols;
}

size_t BlockImageBytes(const WeightView& weight) { return BlockImageOf(weight).bytes; }

KernelStatus PackBlockImage(const WeightView& weight, void* packed) {
  const LinearDesc desc{0,
                        weight.out,
                        weight.in,
                        weight.layout,
                        weight.dtype,
                        weight.dtype,
                        weight.block_rows,
                        weight.block_cols,
                        weight.count};
  if (!FitsBlockImage(desc) && !FitsF32BlockImage(desc)) {
    return {KernelCode::kUnsupported,
            "block image: needs f32, bf16 or f16 blocks with sides 16, 32, 64, 128"};
  }
  const BlockImage image = BlockImageOf(weight);
  char* base = static_cast<char*>(packed);
  try {
    const BlockRows rows = GroupByRow(weight);
    std::memset(base, 0, image.values_offset);
    auto* panels = reinterpret_cast<Panel*>(base + image.panels_offset);
    char* values = base + image.values_offset;
    if (weight.dtype == DType::kFloat32) {
      PackPanels(weight, image, rows, panels, reinterpret_cast<float*>(values), CopyF32Panel);
    } else {
      PackPanels(weight, image, rows, panels, reinterpret_cast<uint16_t*>(values), CopyPanel);
    }
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

KernelStatus LocateInBlockImage(const WeightView& weight, std::span<const int64_t> elements,
                                int64_t* offsets) try {
  const BlockImage image = BlockImageOf(weight);
  const BlockRows rows = GroupByRow(weight);
  const int kc = image.panel_columns;
  BlockFinder finder(weight, rows);
  for (const int64_t element : elements) {
    const auto [entry, r, c] = finder.Find(element);
    const int64_t panel = entry * (weight.block_cols / kc) + c / kc;
    *offsets++ = entry < 0 ? -1
                           : static_cast<int64_t>(image.values_offset + panel * image.panel_bytes) +
                                 ByteInPanel(weight.dtype, kc, r, c % kc);
  }
  return {};
} catch (const std::bad_alloc&) {
  return {KernelCode::kOutOfMemory, "block image: no host memory for the row lists"};
}

}  // namespace espalier::kernels::cuda
