#include "kernels/cuda/gather_image.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

namespace espalier::kernels::cuda {
namespace {

size_t AlignUp(size_t bytes) { return (bytes + kUnitBytes - 1) / kUnitBytes * kUnitBytes; }

// Column of row `row` on diagonal `offset`, or a value >= in where the diagonal misses the row (tall layers).
int64_t PositionOf(const WeightView& w, int64_t row, int64_t offset) {
  return w.out >= w.in ? (row - offset + w.out) % w.out : (row + offset) % w.in;
}

// Index into values of (diagonal k, row `row` at column `column`).
int64_t ValueIndex(const WeightView& w, int64_t k, int64_t row, int64_t column) {
  return k * w.diagonal_length() + (w.out >= w.in ? column : row);
}

// Does diagonal `offset` meet a row of [first, last)?
bool Meets(const WeightView& w, int64_t offset, int64_t first, int64_t last) {
  if (w.out < w.in) return true;
  const int64_t start = PositionOf(w, first, offset);
  return start < w.in || start + (last - first) > w.out;  // begins inside, or wraps to column 0
}

// Calls on_tile(tile, first row, end row, its units' entries) where an entry is a diagonal's number.
template <typename OnTile>
void ForEachDiagonalTile(const WeightView& w, const GatherImage& image, OnTile on_tile) {
  std::vector<int64_t> met;
  for (int64_t tile = 0; tile < image.tiles; ++tile) {
    const int64_t first = tile * image.tile_rows, last = std::min(first + image.tile_rows, w.out);
    met.clear();
    for (int64_t k = 0; k < w.count; ++k) {
      if (Meets(w, w.offsets[k], first, last)) met.push_back(k);
    }
    on_tile(tile, first, last, met);
  }
}

int64_t UnitsFor(int64_t entries) { return (entries + kUnitEntries - 1) / kUnitEntries; }

int64_t LongestRow(const WeightView& w, int64_t tile) {
  int64_t longest = 0;
  for (int64_t row = tile * kCsrTileRows; row < std::min((tile + 1) * kCsrTileRows, w.out); ++row) {
    longest = std::max<int64_t>(longest, w.row_ptr[row + 1] - w.row_ptr[row]);
  }
  return longest;
}

// Value: uint16_t for the 2-byte types, uint32_t for fp32.
template <typename Value>
void PackDiagonal(const WeightView& w, const GatherImage& image, char* base) {
  constexpr int64_t kHalves = sizeof(Value) == 2 ? 2 : 1;  // rows a lane
  auto* tiles = reinterpret_cast<int32_t*>(base);
  auto* starts = reinterpret_cast<uint16_t*>(base + image.starts_offset);
  auto* units = reinterpret_cast<Value*>(base + image.units_offset);
  constexpr int64_t kUnitValues = kUnitBytes / sizeof(Value), kLaneValues = 16 / sizeof(Value);
  const auto* values = static_cast<const Value*>(w.values);
  int64_t unit = 0;
  ForEachDiagonalTile(
      w, image, [&](int64_t tile, int64_t first, int64_t last, const std::vector<int64_t>& met) {
        tiles[tile] = static_cast<int32_t>(unit);
        const int64_t count = UnitsFor(static_cast<int64_t>(met.size()));
        std::memset(units + unit * kUnitValues, 0, count * kUnitBytes);
        std::fill_n(starts + unit * kUnitEntries, count * kUnitEntries,
                    static_cast<uint16_t>(image.wrapped));
        for (size_t i = 0; i < met.size(); ++i) {
          const int64_t at = unit + static_cast<int64_t>(i) / kUnitEntries,
                        entry = static_cast<int64_t>(i) % kUnitEntries;
          const int64_t offset = w.offsets[met[i]];
          starts[at * kUnitEntries + entry] = static_cast<uint16_t>(PositionOf(w, first, offset));
          for (int64_t row = first; row < last; ++row) {
            const int64_t column = PositionOf(w, row, offset);
            if (column >= w.in) continue;
            const int64_t lane = (row - first) % 32, half = (row - first) / 32;
            units[at * kUnitValues + lane * kLaneValues + entry * kHalves + half] =
                values[ValueIndex(w, met[i], row, column)];
          }
        }
        unit += count;
      });
  tiles[image.tiles] = static_cast<int32_t>(unit);
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

// As PackDiagonal places them.
void LocateOnDiagonals(const WeightView& w, const GatherImage& image,
                       std::span<const int64_t> elements, int64_t* offsets) {
  const auto size = static_cast<int64_t>(SizeOf(w.dtype));
  const int64_t halves = size == 2 ? 2 : 1;
  size_t next = 0;
  int64_t unit = 0;
  ForEachDiagonalTile(
      w, image, [&](int64_t, int64_t first, int64_t last, const std::vector<int64_t>& met) {
        for (; next < elements.size() && elements[next] / w.in < last; ++next) {
          const int64_t row = elements[next] / w.in, column = elements[next] % w.in;
          const int64_t offset =
              w.out >= w.in ? (row - column + w.out) % w.out : (column - row + w.in) % w.in;
          const int32_t* at = std::lower_bound(w.offsets, w.offsets + w.count, offset);
          if (at == w.offsets + w.count || *at != offset) {
            offsets[next] = -1;
            continue;
          }
          const int64_t i = std::lower_bound(met.begin(), met.end(), at - w.offsets) - met.begin();
          const int64_t lane = (row - first) % 32, half = (row - first) / 32;
          offsets[next] = static_cast<int64_t>(image.units_offset) +
                          (unit + i / kUnitEntries) * kUnitBytes + lane * 16 +
                          (i % kUnitEntries * halves + half) * size;
        }
        unit += UnitsFor(static_cast<int64_t>(met.size()));
      });
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
  image.starts_offset = AlignUp((image.tiles + 1) * 4);
  const size_t starts = is_diagonal ? image.tiles * UnitsFor(weight.count) * kUnitEntries * 2 : 0;
  image.units_offset = image.starts_offset + AlignUp(starts);
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
    ForEachDiagonalTile(weight, image,
                        [&](int64_t, int64_t, int64_t, const std::vector<int64_t>& met) {
                          units += UnitsFor(static_cast<int64_t>(met.size()));
                        });
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
      (is_f32 ? PackDiagonal<uint32_t> : PackDiagonal<uint16_t>)(weight, image, base);
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
  (weight.layout == Layout::kDiagonal ? LocateOnDiagonals : LocateInRows)(weight, image, elements,
                                                                          offsets);
  return {};
} catch (const std::bad_alloc&) {
  return {KernelCode::kOutOfMemory, "gather image: no host memory for the list of diagonals"};
}

}  // namespace espalier::kernels::cuda
