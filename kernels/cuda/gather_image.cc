#include "kernels/cuda/gather_image.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "kernels/cuda/diagonal_tiles.h"

namespace espalier::kernels::cuda {
namespace {

int64_t EntryOfStart(int64_t entry) { return entry; }

int64_t LongestRow(const WeightView& w, int64_t tile) {
  int64_t longest = 0;
  for (int64_t row = tile * kCsrTileRows; row < std::min((tile + 1) * kCsrTileRows, w.out); ++row) {
    longest = std::max<int64_t>(longest, w.row_ptr[row + 1] - w.row_ptr[row]);
  }
  return longest;
}

// Value (row, entry) of a unit of diagonals lies at this byte.
template <typename Value>
int64_t PlaceOnDiagonal(int64_t row, int64_t entry) {
  constexpr int64_t kHalves = sizeof(Value) == 2 ? 2 : 1;  // rows a lane
  return row % 32 * 16 + (entry * kHalves + row / 32) * static_cast<int64_t>(sizeof(Value));
}

template <typename Value>
void PackCsr(const WeightView& w, const GatherImage& image, char* base) {
  auto* tiles = reinterpret_cast<int32_t*>(base);
  const auto* values = static_cast<const Value*>(w.values);
  const auto positions_of = [&](int64_t unit, int64_t lane) {
    char* at = base + image.units_offset + unit * image.unit_bytes;
    return reinterpret_cast<uint16_t*>(at + (sizeof(Value) == 2 ? lane * 16 : 512 + lane * 8));
  };
  const auto values_of = [&](int64_t unit, int64_t lane) {
    char* at = base + image.units_offset + unit * image.unit_bytes;
    return reinterpret_cast<Value*>(at + lane * 16 + (sizeof(Value) == 2 ? 8 : 0));
  };
  int64_t unit = 0;
  for (int64_t tile = 0; tile < image.tiles; ++tile) {
    tiles[tile] = static_cast<int32_t>(unit);
    const int64_t count = UnitsFor(LongestRow(w, tile));
    for (int64_t i = 0; i < count * 32; ++i) {
      std::fill_n(positions_of(unit + i / 32, i % 32), kUnitEntries,
                  static_cast<uint16_t>(image.wrapped));
      std::fill_n(values_of(unit + i / 32, i % 32), kUnitEntries, Value{0});
    }
    for (int64_t row = tile * kCsrTileRows; row < std::min((tile + 1) * kCsrTileRows, w.out);
         ++row) {
      for (int64_t i = 0; i < w.row_ptr[row + 1] - w.row_ptr[row]; ++i) {
        const int64_t stored = w.row_ptr[row] + i;
        const int64_t at = unit + i / kUnitEntries, lane = row % kCsrTileRows;
        positions_of(at, lane)[i % kUnitEntries] = static_cast<uint16_t>(w.col_idx[stored]);
        values_of(at, lane)[i % kUnitEntries] = values[stored];
      }
    }
    unit += count;
  }
  tiles[image.tiles] = static_cast<int32_t>(unit);
}

// As PackCsr places them.
void LocateInRows(const WeightView& w, const GatherImage& image, std::span<const int64_t> elements,
                  int64_t* offsets) {
  const auto size = static_cast<int64_t>(SizeOf(w.dtype));
  int64_t tile = 0, unit = 0;
  for (const int64_t element : elements) {
    const int64_t row = element / w.in, column = element % w.in;
    for (; tile < row / kCsrTileRows; ++tile) unit += UnitsFor(LongestRow(w, tile));
    const int32_t* const first = w.col_idx + w.row_ptr[row];
    const int32_t* const end = w.col_idx + w.row_ptr[row + 1];
    const int32_t* at = std::lower_bound(first, end, column);
    const int64_t i = at - first, lane = row % kCsrTileRows;
    *offsets++ = at == end || *at != column
                     ? -1
                     : static_cast<int64_t>(image.units_offset) +
                           (unit + i / kUnitEntries) * image.unit_bytes + lane * 16 +
                           (size == 2 ? 8 : 0) + i % kUnitEntries * size;
  }
}

}  // namespace

GatherImage GatherImageOf(const WeightView& weight) {
  GatherImage image;
  const bool is_diagonal = weight.layout == Layout::kDiagonal;
  const bool is_f32 = weight.dtype == DType::kFloat32;
  image.tile_rows = is_diagonal && !is_f32 ? kDiagonalTileRows : kCsrTileRows;
  image.unit_bytes = !is_diagonal && is_f32 ? kF32CsrUnitBytes : kUnitBytes;
  image.tiles = (weight.out + image.tile_rows - 1) / image.tile_rows;
  image.modulus = is_diagonal ? std::max(weight.out, weight.in) : weight.in;
  image.wrapped = is_diagonal ? image.modulus + kDiagonalTileRows : weight.in;
  image.positions = is_diagonal ? image.wrapped + kDiagonalTileRows : image.wrapped + 1;
  image.starts_offset = AlignUpToUnit((image.tiles + 1) * 4);
  const size_t starts = is_diagonal ? image.tiles * UnitsFor(weight.count) * kUnitEntries * 2 : 0;
  image.units_offset = image.starts_offset + AlignUpToUnit(starts);
  return image;
}

bool FitsGatherImage(const LinearDesc& desc) {
  constexpr int64_t kMostPositions = std::numeric_limits<uint16_t>::max() - kDiagonalTileRows;
  constexpr int64_t kMostF32Positions = 48 * 1024;  // 192 KiB of shared memory
  const bool is_csr = desc.layout == Layout::kCsr;
  const bool is_diagonal =
      desc.layout == Layout::kDiagonal && desc.block_rows == 1 && desc.block_cols == 1;
  if (!is_csr && !is_diagonal) return false;
  const bool is_f32 = desc.weight_dtype == DType::kFloat32;
  const int64_t most_positions = is_f32 ? kMostF32Positions : kMostPositions;
  if (!is_f32 && desc.weight_dtype != DType::kBFloat16 && desc.weight_dtype != DType::kFloat16)
    return false;
  if (desc.io_dtype != desc.weight_dtype || desc.in < 1 || desc.out < 1) return false;
  if (desc.count < 0 || desc.count > std::numeric_limits<int32_t>::max() / 2) return false;
  if (is_csr) return desc.in <= most_positions && desc.out <= (int64_t{1} << 30);
  return std::max(desc.in, desc.out) <= most_positions && desc.count <= std::max(desc.in, desc.out);
}

size_t GatherImageBytes(const WeightView& weight) {
  const GatherImage image = GatherImageOf(weight);
  int64_t units = 0;
  if (weight.layout == Layout::kDiagonal) {
    units = DiagonalUnits(weight, image);
  } else {
    for (int64_t tile = 0; tile < image.tiles; ++tile) units += UnitsFor(LongestRow(weight, tile));
  }
  return image.units_offset + units * image.unit_bytes;
}

KernelStatus PackGatherImage(const WeightView& weight, void* packed) {
  if (!FitsGatherImage({0, weight.out, weight.in, weight.layout, weight.dtype, weight.dtype,
                        weight.block_rows, weight.block_cols, weight.count})) {
    return {KernelCode::kUnsupported,
            "gather image: needs csr or diagonal(1) below 65,472 columns (f32: 49,153)"};
  }
  const GatherImage image = GatherImageOf(weight);
  char* base = static_cast<char*>(packed);
  std::memset(base, 0, image.units_offset);
  try {
    const bool is_f32 = weight.dtype == DType::kFloat32;
    if (weight.layout == Layout::kDiagonal) {
      if (is_f32) {
        PackDiagonals<uint32_t>(weight, image, base, EntryOfStart, PlaceOnDiagonal<uint32_t>);
      } else {
        PackDiagonals<uint16_t>(weight, image, base, EntryOfStart, PlaceOnDiagonal<uint16_t>);
      }
    } else {
      (is_f32 ? PackCsr<uint32_t> : PackCsr<uint16_t>)(weight, image, base);
    }
  } catch (const std::bad_alloc&) {
    return {KernelCode::kOutOfMemory, "gather image: no host memory for the list of diagonals"};
  }
  return {};
}

KernelStatus LocateInGatherImage(const WeightView& weight, std::span<const int64_t> elements,
                                 int64_t* offsets) try {
  const GatherImage image = GatherImageOf(weight);
  if (weight.layout == Layout::kCsr) {
    LocateInRows(weight, image, elements, offsets);
  } else {
    LocateOnDiagonals(
        weight, image, elements, offsets,
        weight.dtype == DType::kFloat32 ? PlaceOnDiagonal<uint32_t> : PlaceOnDiagonal<uint16_t>);
  }
  return {};
} catch (const std::bad_alloc&) {
  return {KernelCode::kOutOfMemory, "gather image: no host memory for the list of diagonals"};
}

}  // namespace espalier::kernels::cuda
