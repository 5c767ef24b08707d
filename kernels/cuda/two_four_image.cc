#include "kernels/cuda/two_four_image.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "kernels/cuda/block_image.h"
#include "kernels/cuda/scattered_values.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kGroupStrips = kTwoFourGroupRows / kTwoFourRows;
constexpr int kNone = -1;  // no value at this place

enum class Kind : uint8_t { kNone, kSparse, kDense };
constexpr Kind kStoredKinds[] = {Kind::kDense, Kind::kSparse};  // in this order

// 64 rows of a weight: which value is where, and of what kind the pieces are.
class Strip {
 public:
  Strip(const WeightView& w, int64_t columns)
      : w_(w),
        columns_(columns),
        places_(kTwoFourRows * columns),
        kinds_(columns / kTwoFourColumns) {}

  void Fill(int64_t first) {
    std::fill(places_.begin(), places_.end(), kNone);
    std::fill(kinds_.begin(), kinds_.end(), Kind::kNone);
    const int64_t last = std::min(first + kTwoFourRows, w_.out);
    ForEachValueInRows(w_, first, last, [&](int64_t row, int64_t column, int64_t index) {
      places_[(row - first) * columns_ + column] = static_cast<int32_t>(index);
      kinds_[column / kTwoFourColumns] = Kind::kSparse;
    });
    for (size_t piece = 0; piece < kinds_.size(); ++piece) {
      if (kinds_[piece] == Kind::kSparse && IsCrowded(piece)) kinds_[piece] = Kind::kDense;
    }
  }

  Kind KindOf(int64_t piece) const { return kinds_[piece]; }
  // Indices of values, or kNone: the 32 columns of row `row` of a piece.
  const int32_t* Places(int64_t piece, int row) const {
    return places_.data() + row * columns_ + piece * kTwoFourColumns;
  }

 private:
  bool IsCrowded(int64_t piece) const {
    for (int row = 0; row < kTwoFourRows; ++row) {
      const int32_t* places = Places(piece, row);
      for (int c = 0; c < kTwoFourColumns; c += 4) {
        if (std::count(places + c, places + c + 4, kNone) < 2) return true;
      }
    }
    return false;
  }

  const WeightView& w_;
  int64_t columns_;
  std::vector<int32_t> places_;
  std::vector<Kind> kinds_;
};

void PackDense(const Strip& strip, int64_t piece, const uint16_t* values, char* to) {
  const int mask = SwizzleMask(kTwoFourColumns);
  for (int row = 0; row < kTwoFourRows; ++row) {
    const int32_t* places = strip.Places(piece, row);
    for (int c = 0; c < kTwoFourColumns; ++c) {
      const uint16_t value = places[c] == kNone ? 0 : values[places[c]];
      std::memcpy(to + Swizzled(2 * (row * kTwoFourColumns + c), mask), &value, sizeof(value));
    }
  }
}

constexpr int kKept = kTwoFourColumns / 2;  // values of a row of a sparse piece

// The two columns of a group of four that a sparse piece keeps: those with a value, and others where they are fewer.
std::array<int, 2> KeptColumns(const int32_t* places) {
  std::array<int, 2> kept;
  int count = 0, missing = static_cast<int>(std::count(places, places + 4, kNone)) - 2;
  for (int c = 0; c < 4 && count < 2; ++c) {
    if (places[c] == kNone && missing-- <= 0) continue;
    kept[count++] = c;
  }
  return kept;
}

// Byte of value `index` of a row's group.
int SparseByte(int row, int group, int index) {
  return Swizzled(2 * (row * kKept + 2 * group + index), SwizzleMask(kKept));
}

void PackSparse(const Strip& strip, int64_t piece, const uint16_t* values, char* to) {
  std::array<uint32_t, kTwoFourRows> metadata{};
  for (int row = 0; row < kTwoFourRows; ++row) {
    for (int group = 0; group < kTwoFourColumns / 4; ++group) {
      const int32_t* places = strip.Places(piece, row) + 4 * group;
      const std::array<int, 2> kept = KeptColumns(places);
      for (int i = 0; i < 2; ++i) {
        const uint16_t value = places[kept[i]] == kNone ? 0 : values[places[kept[i]]];
        std::memcpy(to + SparseByte(row, group, i), &value, sizeof(value));
      }
      const int word = row / 16 * 16 + row % 8 * 2 + group / 4, half = row / 8 % 2;
      metadata[word] |= static_cast<uint32_t>(kept[0] | kept[1] << 2)
                        << (16 * half + 4 * (group % 4));
    }
  }
  std::memcpy(to + kSparseValuesBytes, metadata.data(), sizeof(metadata));
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
size_t AlignUp(size_t bytes) {
  return (bytes + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
}

using Strips = std::array<Strip, kGroupStrips>;

TwoFourPanel PanelOf(const Strips& strips, int64_t column, int half, uint32_t begin) {
  TwoFourPanel panel{static_cast<int32_t>(column), begin, 0, 0};
  for (int rows = 0; rows < 2; ++rows) {
    uint32_t size = 0;
    for (Kind kind : kStoredKinds) {
      for (int j = 0; j < 2; ++j) {
        if (strips[2 * half + rows].KindOf(column / kTwoFourColumns + j) != kind) continue;
        const uint32_t mark = kind == Kind::kDense ? kDensePiece : kSparsePiece;
        panel.pieces |= (mark | size) << (16 * rows + 8 * j);
        size += (kind == Kind::kDense ? kDensePieceBytes : kSparsePieceBytes) / kPieceUnit;
      }
    }
    panel.sizes |= size << 16 * rows;
  }
  return panel;
}

// Of piece p, from the first of all pieces on.
size_t PieceOffset(const TwoFourPanel& panel, int p) {
  const uint32_t place = panel.pieces >> (8 * p) & 0xff;
  return size_t{panel.begin + (p < 2 ? 0 : panel.sizes & 0xffff) + (place & kPieceOffsetMask)} *
         kPieceUnit;
}

uint32_t SizeOf(const TwoFourPanel& panel) { return (panel.sizes & 0xffff) + (panel.sizes >> 16); }

// on_group(g) before a group's panels; on_panel(both halves, strips) for each that holds a value.
template <typename OnGroup, typename OnPanel>
void ForEachPanel(const WeightView& w, OnGroup on_group, OnPanel on_panel) {
  const TwoFourImage image = TwoFourImageOf(w);
  const Strip empty(w, image.panel_columns * kTwoFourPanelColumns);
  Strips strips = {empty, empty, empty, empty};
  uint32_t unit = 0;
  for (int64_t g = 0; g < image.groups; ++g) {
    on_group(g);
    for (int s = 0; s < kGroupStrips; ++s) strips[s].Fill(g * kTwoFourGroupRows + s * kTwoFourRows);
    for (int64_t c = 0; c < image.panel_columns; ++c) {
      std::array<TwoFourPanel, 2> halves;
      for (int half = 0; half < 2; ++half) {
        halves[half] = PanelOf(strips, c * kTwoFourPanelColumns, half, unit);
        unit += SizeOf(halves[half]);
      }
      if (SizeOf(halves[0]) + SizeOf(halves[1]) > 0) on_panel(halves, strips);
    }
  }
}

void Pack(const WeightView& w, char* base) {
  const TwoFourImage image = TwoFourImageOf(w);
  auto* groups = reinterpret_cast<int32_t*>(base);
  auto* panels = reinterpret_cast<TwoFourPanel*>(base + image.panels_offset);
  const auto* values = static_cast<const uint16_t*>(w.values);
  int32_t count = 0;
  ForEachPanel(
      w, [&](int64_t g) { groups[g] = count; },
      [&](const std::array<TwoFourPanel, 2>& halves, const Strips& strips) {
        for (int half = 0; half < 2; ++half) {
          const TwoFourPanel& panel = panels[2 * count + half] = halves[half];
          for (int p = 0; p < 4; ++p) {
            const uint32_t place = panel.pieces >> (8 * p) & 0xff;
            if (place == 0) continue;
            char* to = base + image.pieces_offset + PieceOffset(panel, p);
            (place & kDensePiece ? PackDense : PackSparse)(
                strips[2 * half + p / 2], panel.column / kTwoFourColumns + p % 2, values, to);
          }
        }
        ++count;
      });
  groups[image.groups] = count;
}

// Byte of (row, column) of a half from the first of all pieces on, or -1 where no value is stored.
int64_t ByteOf(const TwoFourPanel& panel, const Strips& strips, int half, int row, int column) {
  const int p = row / kTwoFourRows * 2 + column / kTwoFourColumns;
  const Strip& strip = strips[2 * half + p / 2];
  const int64_t piece = panel.column / kTwoFourColumns + p % 2;
  const int r = row % kTwoFourRows, c = column % kTwoFourColumns;
  const int32_t* places = strip.Places(piece, r);
  if (places[c] == kNone) return -1;
  const auto first = static_cast<int64_t>(PieceOffset(panel, p));
  if (strip.KindOf(piece) == Kind::kDense)
    return first + Swizzled(2 * (r * kTwoFourColumns + c), SwizzleMask(kTwoFourColumns));
  return first + SparseByte(r, c / 4, KeptColumns(places + c / 4 * 4)[0] == c % 4 ? 0 : 1);
}

void Locate(const WeightView& w, std::span<const int64_t> elements, int64_t* offsets) {
  const TwoFourImage image = TwoFourImageOf(w);
  std::fill_n(offsets, elements.size(), int64_t{-1});
  std::vector<std::vector<size_t>> in_panel(image.panel_columns);  // elements of a group
  size_t next = 0;
  ForEachPanel(
      w,
      [&](int64_t g) {
        for (auto& list : in_panel) list.clear();
        for (; next < elements.size() && elements[next] / w.in < (g + 1) * kTwoFourGroupRows;
             ++next)
          in_panel[elements[next] % w.in / kTwoFourPanelColumns].push_back(next);
      },
      [&](const std::array<TwoFourPanel, 2>& halves, const Strips& strips) {
        for (size_t i : in_panel[halves[0].column / kTwoFourPanelColumns]) {
          const auto row = static_cast<int>(elements[i] / w.in % kTwoFourGroupRows),
                     column = static_cast<int>(elements[i] % w.in % kTwoFourPanelColumns);
          constexpr int kHalfRows = kTwoFourGroupRows / 2;
          const int half = row / kHalfRows;
          const int64_t byte = ByteOf(halves[half], strips, half, row % kHalfRows, column);
          if (byte >= 0) offsets[i] = static_cast<int64_t>(image.pieces_offset) + byte;
        }
      });
}

}  // namespace

TwoFourImage TwoFourImageOf(const WeightView& weight) {
  TwoFourImage image;
  image.groups = CeilDiv(weight.out, kTwoFourGroupRows);
  image.panel_columns = CeilDiv(weight.in, kTwoFourPanelColumns);
  image.panels_offset = AlignUp((image.groups + 1) * sizeof(int32_t));
  image.pieces_offset =
      image.panels_offset + AlignUp(image.groups * image.panel_columns * 2 * sizeof(TwoFourPanel));
  return image;
}

bool FitsTwoFourImage(const LinearDesc& desc) {
  constexpr int64_t kMostElements = int64_t{1} << 31;
  const bool is_diagonal =
      desc.layout == Layout::kDiagonal && desc.block_rows == 1 && desc.block_cols == 1;
  if (desc.layout != Layout::kCsr && !is_diagonal) return false;
  if (desc.weight_dtype != DType::kBFloat16 && desc.weight_dtype != DType::kFloat16) return false;
  if (desc.io_dtype != desc.weight_dtype || desc.in < 1 || desc.out < 1 || desc.count < 0)
    return false;
  if (desc.in > kMostElements / desc.out) return false;
  return desc.count <= (is_diagonal ? std::max(desc.in, desc.out) : desc.in * desc.out);
}

size_t TwoFourImageBytes(const WeightView& weight) {
  size_t bytes = TwoFourImageOf(weight).pieces_offset;
  ForEachPanel(
      weight, [](int64_t) {},
      [&](const std::array<TwoFourPanel, 2>& halves, const Strips&) {
        bytes += size_t{SizeOf(halves[0]) + SizeOf(halves[1])} * kPieceUnit;
      });
  return bytes;
}

KernelStatus PackTwoFourImage(const WeightView& weight, void* packed) {
  if (!FitsTwoFourImage({0, weight.out, weight.in, weight.layout, weight.dtype, weight.dtype,
                         weight.block_rows, weight.block_cols, weight.count})) {
    return {KernelCode::kUnsupported,
            "2:4 image: needs 2-byte csr or diagonal(1), at most 2^31 elements"};
  }
  std::memset(packed, 0, TwoFourImageOf(weight).pieces_offset);
  try {
    Pack(weight, static_cast<char*>(packed));
  } catch (const std::bad_alloc&) {
    return {KernelCode::kOutOfMemory, "2:4 image: no host memory for the places of the values"};
  }
  return {};
}

KernelStatus LocateInTwoFourImage(const WeightView& weight, std::span<const int64_t> elements,
                                  int64_t* offsets) try {
  Locate(weight, elements, offsets);
  return {};
} catch (const std::bad_alloc&) {
  return {KernelCode::kOutOfMemory, "2:4 image: no host memory for the places of the values"};
}

}  // namespace espalier::kernels::cuda
