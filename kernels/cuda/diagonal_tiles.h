// diagonal_tiles.h — diagonal(1) weights cut into tiles of rows and units of four diagonals (gather_image.h), for packers.
//
// Where a unit keeps the value of (row of the tile, diagonal of the unit) is the image's: `place(row, entry)` is its byte.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/cuda/gather_image.h"

namespace espalier::kernels::cuda {

inline size_t AlignUpToUnit(size_t bytes) {
  return (bytes + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
}
inline int64_t UnitsFor(int64_t entries) { return (entries + kUnitEntries - 1) / kUnitEntries; }

// Column of row `row` on diagonal `offset`, or a value >= in where the diagonal misses the row (tall layers).
inline int64_t PositionOf(const WeightView& w, int64_t row, int64_t offset) {
  return w.out >= w.in ? (row - offset + w.out) % w.out : (row + offset) % w.in;
}

// Index into values of (diagonal k, row `row` at column `column`).
inline int64_t ValueIndex(const WeightView& w, int64_t k, int64_t row, int64_t column) {
  return k * w.diagonal_length() + (w.out >= w.in ? column : row);
}

// Does diagonal `offset` meet a row of [first, last)?
inline bool Meets(const WeightView& w, int64_t offset, int64_t first, int64_t last) {
  if (w.out < w.in) return true;
  const int64_t start = PositionOf(w, first, offset);
  return start < w.in || start + (last - first) > w.out;  // begins inside, or wraps to column 0
}

// Calls on_tile(tile, first row, end row, the numbers of the diagonals that meet it).
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

inline int64_t DiagonalUnits(const WeightView& w, const GatherImage& image) {
  int64_t units = 0;
  ForEachDiagonalTile(w, image, [&](int64_t, int64_t, int64_t, const std::vector<int64_t>& met) {
    units += UnitsFor(static_cast<int64_t>(met.size()));
  });
  return units;
}

// Value: uint16_t for the 2-byte types, uint32_t for fp32. The start of a unit's diagonal `entry` is its start number
// slot(entry).
template <typename Value, typename Slot, typename Place>
void PackDiagonals(const WeightView& w, const GatherImage& image, char* base, Slot slot,
                   Place place) {
  auto* tiles = reinterpret_cast<int32_t*>(base);
  auto* starts = reinterpret_cast<uint16_t*>(base + image.starts_offset);
  char* const units = base + image.units_offset;
  const auto* values = static_cast<const Value*>(w.values);
  int64_t unit = 0;
  ForEachDiagonalTile(
      w, image, [&](int64_t tile, int64_t first, int64_t last, const std::vector<int64_t>& met) {
        tiles[tile] = static_cast<int32_t>(unit);
        const int64_t count = UnitsFor(static_cast<int64_t>(met.size()));
        std::memset(units + unit * kUnitBytes, 0, count * kUnitBytes);
        std::fill_n(starts + unit * kUnitEntries, count * kUnitEntries,
                    static_cast<uint16_t>(image.wrapped));
        for (size_t i = 0; i < met.size(); ++i) {
          const int64_t at = unit + static_cast<int64_t>(i) / kUnitEntries,
                        entry = static_cast<int64_t>(i) % kUnitEntries;
          const int64_t offset = w.offsets[met[i]];
          starts[at * kUnitEntries + slot(entry)] =
              static_cast<uint16_t>(PositionOf(w, first, offset));
          for (int64_t row = first; row < last; ++row) {
            const int64_t column = PositionOf(w, row, offset);
            if (column >= w.in) continue;
            std::memcpy(units + at * kUnitBytes + place(row - first, entry),
                        values + ValueIndex(w, met[i], row, column), sizeof(Value));
          }
        }
        unit += count;
      });
  tiles[image.tiles] = static_cast<int32_t>(unit);
}

// LinearVariant::locate of what PackDiagonals packs.
template <typename Place>
void LocateOnDiagonals(const WeightView& w, const GatherImage& image,
                       std::span<const int64_t> elements, int64_t* offsets, Place place) {
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
          offsets[next] = static_cast<int64_t>(image.units_offset) +
                          (unit + i / kUnitEntries) * kUnitBytes +
                          place(row - first, i % kUnitEntries);
        }
        unit += UnitsFor(static_cast<int64_t>(met.size()));
      });
}

}  // namespace espalier::kernels::cuda
