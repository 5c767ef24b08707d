#include "kernels/cuda/row_group_image.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <tuple>
#include <vector>

#include "kernels/cuda/block_rows.h"

namespace espalier::kernels::cuda {
namespace {

size_t AlignUp(size_t bytes) {
  return (bytes + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
}

// One panel of a group: its columns, which half and row of the group it belongs to, where its values are.
struct GroupPanel {
  int32_t slab_column;
  int32_t column;
  int32_t half;
  int32_t row;
  int32_t block;
  int32_t split;
};

// By slab, the order in which steps take them.
std::vector<GroupPanel> PanelsOfGroup(const WeightView& weight, const BlockRows& rows,
                                      int64_t group) {
  const int half_rows = HalfRows(weight.block_rows), kc = PanelColumns(weight.block_cols);
  const int slab_columns = SlabColumns(kc);
  const int64_t group_rows = int64_t{Halves(weight.block_rows)} * half_rows;
  const int64_t first = group * group_rows;
  const int64_t last = std::min(first + group_rows, weight.block_row_count());
  std::vector<GroupPanel> panels;
  for (int64_t row = first; row < last; ++row) {
    const auto in_group = static_cast<int32_t>(row - first);
    for (int32_t i = rows.row_begin[row]; i < rows.row_begin[row + 1]; ++i) {
      for (int split = 0; split < weight.block_cols / kc; ++split) {
        const int32_t column = rows.entries[i].column * weight.block_cols + split * kc;
        panels.push_back({column / slab_columns * slab_columns, column, in_group / half_rows,
                          in_group % half_rows, rows.entries[i].block, split});
      }
    }
  }
  std::stable_sort(panels.begin(), panels.end(), [](const GroupPanel& a, const GroupPanel& b) {
    return a.slab_column < b.slab_column;
  });
  return panels;
}

// How many of the panels from `begin` on form the next step: as many slabs, and panels of either half, as fit.
size_t StepLength(const std::vector<GroupPanel>& panels, size_t begin, int max_slabs,
                  int max_panels) {
  int slabs = 0, taken[2] = {0, 0};
  size_t i = begin;
  for (; i < panels.size(); ++i) {
    const bool new_slab = i == begin || panels[i].slab_column != panels[i - 1].slab_column;
    if (new_slab && slabs == max_slabs) break;
    if (taken[panels[i].half] == max_panels) break;
    slabs += new_slab ? 1 : 0;
    ++taken[panels[i].half];
  }
  return i - begin;
}

// Both halves of a step (the second is empty where groups have one); sorts its panels by half, row and column.
void MakeStep(std::vector<GroupPanel>::iterator begin, std::vector<GroupPanel>::iterator end,
              int panel_columns, int64_t first_panel, Step* halves) {
  Step shared{};
  for (auto it = begin; it != end; ++it) {
    if (shared.slabs == 0 || shared.column[shared.slabs - 1] != it->slab_column) {
      shared.column[shared.slabs++] = it->slab_column;
    }
  }
  halves[0] = halves[1] = shared;
  std::sort(begin, end, [](const GroupPanel& a, const GroupPanel& b) {
    return std::tuple(a.half, a.row, a.column) < std::tuple(b.half, b.row, b.column);
  });
  for (auto it = begin; it != end; ++it) {
    Step& step = halves[it->half];
    const auto slab =
        std::lower_bound(shared.column, shared.column + shared.slabs, it->slab_column) -
        shared.column;
    const auto offset = slab * SlabBytes(panel_columns) + (it->column - it->slab_column) * 2;
    step.x_offset[step.panels++] = static_cast<uint16_t>(offset / 16);
    for (int g = it->row; g < kMaxHalfRows; ++g) ++step.row_end[g];
  }
  halves[0].first_panel = first_panel;
  halves[1].first_panel = first_panel + halves[0].panels;
}

// Calls on_step(group, its two halves, their panels in order) for every step of the weight.
template <typename OnStep>
void ForEachStep(const WeightView& weight, const RowGroupImage& image, OnStep on_step) {
  const BlockRows rows = GroupByRow(weight);
  const int max_slabs = StepSlabs(image.panel_columns);
  const int max_panels = StepPanels(weight.block_rows, image.panel_columns);
  int64_t first_panel = 0;
  for (int64_t group = 0; group < image.groups; ++group) {
    std::vector<GroupPanel> panels = PanelsOfGroup(weight, rows, group);
    for (size_t begin = 0; begin < panels.size();) {
      const size_t length = StepLength(panels, begin, max_slabs, max_panels);
      const auto from = panels.begin() + begin;
      Step halves[2];
      MakeStep(from, from + length, image.panel_columns, first_panel, halves);
      on_step(group, halves, &*from);
      first_panel += length;
      begin += length;
    }
  }
}

}  // namespace

RowGroupImage RowGroupImageOf(const WeightView& weight) {
  const BlockImage blocks = BlockImageOf(weight);
  const int rows = Halves(weight.block_rows) * HalfRows(weight.block_rows);
  RowGroupImage image;
  image.halves = Halves(weight.block_rows);
  image.groups = (blocks.block_rows_count + rows - 1) / rows;
  image.panels = blocks.panels;
  image.panel_columns = blocks.panel_columns;
  image.panel_bytes = blocks.panel_bytes;
  image.values_offset = AlignUp(image.groups * sizeof(GroupSpan));
  image.steps_offset = image.values_offset + AlignUp(image.panels * image.panel_bytes);
  return image;
}

bool FitsRowGroupImage(const LinearDesc& desc) {
  return FitsBlockImage(desc) && (desc.block_rows == 16 || desc.block_rows == 32);
}

size_t RowGroupImageBytes(const WeightView& weight) {
  const RowGroupImage image = RowGroupImageOf(weight);
  size_t steps = 0;
  ForEachStep(weight, image, [&](int64_t, const Step*, const GroupPanel*) { ++steps; });
  return image.steps_offset + AlignUp(image.halves * steps * sizeof(Step));
}

KernelStatus PackRowGroupImage(const WeightView& weight, void* packed) {
  if (!FitsRowGroupImage({0, weight.out, weight.in, weight.layout, weight.dtype, weight.dtype,
                          weight.block_rows, weight.block_cols, weight.count})) {
    return {KernelCode::kUnsupported, "row group image: needs 2-byte blocks of 16 or 32 rows"};
  }
  const RowGroupImage image = RowGroupImageOf(weight);
  const int br = weight.block_rows, bc = weight.block_cols, kc = image.panel_columns;
  char* base = static_cast<char*>(packed);
  uint16_t* values = reinterpret_cast<uint16_t*>(base + image.values_offset);
  Step* steps = reinterpret_cast<Step*>(base + image.steps_offset);
  try {
    std::vector<GroupSpan> spans(image.groups);
    int32_t count = 0;
    int64_t next_group = 0;
    const auto open_until = [&](int64_t group) {
      for (; next_group <= group; ++next_group) {
        spans[next_group] = {static_cast<int32_t>(next_group), count, count, 0};
      }
    };
    ForEachStep(weight, image, [&](int64_t group, const Step* halves, const GroupPanel* panels) {
      open_until(group);
      std::copy_n(halves, image.halves, steps + count * image.halves);
      spans[group].end = ++count;
      for (int i = 0; i < halves[0].panels + halves[1].panels; ++i) {
        const uint16_t* block =
            static_cast<const uint16_t*>(weight.values) + int64_t{panels[i].block} * br * bc;
        CopyPanel(block + panels[i].split * kc, bc, br, kc,
                  values + (halves[0].first_panel + i) * br * kc);
      }
    });
    open_until(image.groups - 1);
    std::stable_sort(spans.begin(), spans.end(), [](const GroupSpan& a, const GroupSpan& b) {
      return a.end - a.begin > b.end - b.begin;
    });
    std::memset(base, 0, image.values_offset);
    std::copy(spans.begin(), spans.end(), reinterpret_cast<GroupSpan*>(base));
  } catch (const std::bad_alloc&) {
    return {KernelCode::kOutOfMemory, "row group image: no host memory for the step lists"};
  }
  return {};
}

KernelStatus LocateInRowGroupImage(const WeightView& weight, std::span<const int64_t> elements,
                                   int64_t* offsets) try {
  const RowGroupImage image = RowGroupImageOf(weight);
  const BlockRows rows = GroupByRow(weight);
  const int kc = image.panel_columns, splits = weight.block_cols / kc;
  std::vector<int64_t> panel_of(image.panels);  // by block and split
  ForEachStep(weight, image, [&](int64_t, const Step* halves, const GroupPanel* panels) {
    for (int i = 0; i < halves[0].panels + halves[1].panels; ++i)
      panel_of[int64_t{panels[i].block} * splits + panels[i].split] = halves[0].first_panel + i;
  });
  BlockFinder finder(weight, rows);
  for (const int64_t element : elements) {
    const auto [entry, r, c] = finder.Find(element);
    if (entry < 0) {
      *offsets++ = -1;
      continue;
    }
    const int64_t panel = panel_of[int64_t{rows.entries[entry].block} * splits + c / kc];
    *offsets++ = static_cast<int64_t>(image.values_offset + panel * image.panel_bytes) +
                 ByteInPanel(weight.dtype, kc, r, c % kc);
  }
  return {};
} catch (const std::bad_alloc&) {
  return {KernelCode::kOutOfMemory, "row group image: no host memory for the step lists"};
}

}  // namespace espalier::kernels::cuda
