#include "kernels/cuda/gather_mma_image.h"

#include <array>
#include <limits>
#include <new>
#include <numeric>

#include "kernels/cuda/diagonal_tiles.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kBanks = 8;  // of 16 bytes: positions that lie apart modulo this are read at once

// The lane that holds row `j` of 16 for products of this parity.
int64_t LaneOf(int64_t j, int64_t parity) {
  const int64_t g = j % 8;
  return 4 * g + (parity ^ g / 4) + j / 8 * 2;
}

int64_t PlaceOnDiagonal(int64_t row, int64_t entry) {
  return LaneOf(row % 16, entry / 2) * 16 + row / 16 * 4 + entry % 2 * 2;
}
int64_t SlotOfStart(int64_t entry) { return entry % 2 * 2 + entry / 2; }

// csr: byte of a unit, by row of the tile and non-zero of the unit.
int64_t PlaceOfValue(int64_t j, int64_t entry) {
  const int64_t product = entry / 2;
  return LaneOf(j, product % 2) * 8 + product / 2 * 4 + entry % 2 * 2;
}
int64_t PlaceOfPosition(int64_t j, int64_t entry) {
  const int64_t product = entry / 2;
  return kUnitBytes / 2 + (entry % 2 * 16 + (j ^ product % 2 * 4)) * 8 + product * 2;
}

int64_t LengthOf(const WeightView& w, int64_t row) {
  return row < w.out ? w.row_ptr[row + 1] - w.row_ptr[row] : 0;
}

// The rows of a window, the longest first; w.out where there is none.
using Window = std::array<int64_t, kMmaWindowRows>;
Window WindowOf(const WeightView& w, int64_t first) {
  Window rows;
  std::iota(rows.begin(), rows.end(), first);
  std::stable_sort(rows.begin(), rows.end(),
                   [&](int64_t a, int64_t b) { return LengthOf(w, a) > LengthOf(w, b); });
  for (int64_t& row : rows) row = std::min(row, w.out);
  return rows;
}

int64_t UnitsOf(const WeightView& w, const int64_t* rows) {  // the first is the longest
  return (LengthOf(w, rows[0]) + kMmaCsrEntries - 1) / kMmaCsrEntries;
}

// visit(j, entry, index of a stored value) for eight rows of a tile, `rows` and j from `first` on: a row's non-zeros in an
// order that has the eight rows in different banks wherever they can be. visit(j, entry, −1 − bank) where there is none.
template <typename Visit>
void ForEachEntryApart(const WeightView& w, const int64_t* rows, int64_t first, int64_t entries,
                       Visit visit) {
  std::array<std::array<std::vector<int32_t>, kBanks>, 8> left;  // a row's non-zeros, by bank
  std::array<int64_t, 8> count;
  for (int64_t j = 0; j < 8; ++j) {
    const int64_t row = rows[first + j];
    count[j] = LengthOf(w, row);
    for (int64_t i = count[j] - 1; i >= 0; --i) {
      const int32_t stored = w.row_ptr[row] + static_cast<int32_t>(i);
      left[j][w.col_idx[stored] % kBanks].push_back(stored);
    }
  }
  for (int64_t entry = 0; entry < entries; ++entry) {
    std::array<bool, kBanks> taken{};
    for (int64_t turn = 0; turn < 8; ++turn) {
      const int64_t j = (entry + turn) % 8;
      const auto fullest = [&](bool only_free) {
        int best = -1;
        for (int bank = 0; bank < kBanks; ++bank) {
          if (left[j][bank].empty() || (only_free && taken[bank])) continue;
          if (best < 0 || left[j][bank].size() > left[j][best].size()) best = bank;
        }
        return best;
      };
      int bank = fullest(true);
      const bool must = count[j] == entries - entry;
      if (bank < 0 && must) bank = fullest(false);
      if (bank < 0) {
        const auto free = std::find(taken.begin(), taken.end(), false);
        taken[free - taken.begin()] = true;
        visit(first + j, entry, -1 - (free - taken.begin()));
        continue;
      }
      taken[bank] = true;
      visit(first + j, entry, int64_t{left[j][bank].back()});
      left[j][bank].pop_back();
      --count[j];
    }
  }
}

// on_tile(tile, its first unit, its sixteen rows, its units) for the tiles of each window.
template <typename OnTile>
int64_t ForEachCsrTile(const WeightView& w, OnTile on_tile) {
  int64_t unit = 0;
  for (int64_t first = 0; first < w.out; first += kMmaWindowRows) {
    const Window window = WindowOf(w, first);
    for (int64_t j = 0; j < kMmaWindowRows; j += kMmaGroupRows) {
      const int64_t units = UnitsOf(w, &window[j]);
      on_tile((first + j) / kMmaGroupRows, unit, &window[j], units);
      unit += units;
    }
  }
  return unit;
}

void PackCsr(const WeightView& w, const GatherImage& image, char* base) {
  auto* tiles = reinterpret_cast<int32_t*>(base);
  auto* tile_rows = reinterpret_cast<int32_t*>(base + image.starts_offset);
  const auto* values = static_cast<const uint16_t*>(w.values);
  tiles[image.tiles] = static_cast<int32_t>(
      ForEachCsrTile(w, [&](int64_t tile, int64_t unit, const int64_t* rows, int64_t units) {
        tiles[tile] = static_cast<int32_t>(unit);
        std::copy_n(rows, kMmaGroupRows, tile_rows + tile * kMmaGroupRows);
        char* const to = base + image.units_offset + unit * kUnitBytes;
        std::memset(to, 0, units * kUnitBytes);
        for (int64_t half = 0; half < kMmaGroupRows; half += 8) {
          ForEachEntryApart(
              w, rows, half, units * kMmaCsrEntries, [&](int64_t j, int64_t entry, int64_t stored) {
                char* const in = to + entry / kMmaCsrEntries * kUnitBytes;
                // Eight positions of zeros, one a bank.
                const auto position = static_cast<uint16_t>(
                    stored >= 0 ? w.col_idx[stored]
                                : w.in + (-1 - stored - w.in % kBanks + kBanks) % kBanks);
                std::memcpy(in + PlaceOfPosition(j, entry % kMmaCsrEntries), &position, 2);
                if (stored >= 0)
                  std::memcpy(in + PlaceOfValue(j, entry % kMmaCsrEntries), values + stored, 2);
              });
        }
      }));
}

// As PackCsr places them.
void LocateInRows(const WeightView& w, const GatherImage& image, std::span<const int64_t> elements,
                  int64_t* offsets) {
  std::vector<int64_t> places;  // of the window's stored values
  int64_t window = -1;
  size_t next = 0;
  const auto resolve = [&] {  // the elements of the window whose places are known
    const int64_t first = window * kMmaWindowRows;
    for (; next < elements.size() && elements[next] / w.in < first + kMmaWindowRows; ++next) {
      const int64_t row = elements[next] / w.in, column = elements[next] % w.in;
      const int32_t* const end = w.col_idx + w.row_ptr[row + 1];
      const int32_t* at = std::lower_bound(w.col_idx + w.row_ptr[row], end, column);
      offsets[next] = at == end || *at != column ? -1 : places[(at - w.col_idx) - w.row_ptr[first]];
    }
  };
  ForEachCsrTile(w, [&](int64_t tile, int64_t unit, const int64_t* rows, int64_t units) {
    const int64_t first = tile * kMmaGroupRows / kMmaWindowRows * kMmaWindowRows;
    const int64_t last = std::min(first + kMmaWindowRows, w.out);
    if (window >= 0 && first != window * kMmaWindowRows) resolve();
    window = first / kMmaWindowRows;
    if (next == elements.size() || elements[next] / w.in >= last) return;
    places.resize(w.row_ptr[last] - w.row_ptr[first]);
    for (int64_t half = 0; half < kMmaGroupRows; half += 8) {
      ForEachEntryApart(
          w, rows, half, units * kMmaCsrEntries, [&](int64_t j, int64_t entry, int64_t stored) {
            if (stored < 0) return;
            places[stored - w.row_ptr[first]] = static_cast<int64_t>(image.units_offset) +
                                                (unit + entry / kMmaCsrEntries) * kUnitBytes +
                                                PlaceOfValue(j, entry % kMmaCsrEntries);
          });
    }
  });
  if (window >= 0) resolve();
}

}  // namespace

GatherImage GatherMmaImageOf(const WeightView& weight) {
  GatherImage image;
  const bool is_diagonal = weight.layout == Layout::kDiagonal;
  image.tile_rows = is_diagonal ? kDiagonalTileRows : kMmaGroupRows;
  image.unit_bytes = kUnitBytes;
  const int64_t windows = (weight.out + kMmaWindowRows - 1) / kMmaWindowRows;
  image.tiles = windows * kMmaWindowRows / image.tile_rows;
  image.modulus = is_diagonal ? std::max(weight.out, weight.in) : weight.in;
  image.wrapped = is_diagonal ? image.modulus + kDiagonalTileRows : weight.in;
  image.positions = image.wrapped + (is_diagonal ? kDiagonalTileRows : kBanks);
  image.starts_offset = AlignUpToUnit((image.tiles + 1) * 4);
  image.units_offset =
      image.starts_offset +
      AlignUpToUnit(is_diagonal ? image.tiles * UnitsFor(weight.count) * kUnitEntries * 2
                                : image.tiles * kMmaGroupRows * 4);
  return image;
}

bool FitsGatherMmaImage(const LinearDesc& desc, bool shares) {
  const bool is_csr = desc.layout == Layout::kCsr;
  const int64_t most = (shares ? kMostMmaStreamPositions : kMostMmaPositions) -
                       (is_csr ? kBanks : 2 * kDiagonalTileRows);
  return desc.weight_dtype != DType::kFloat32 && FitsGatherImage(desc) &&
         (is_csr ? desc.in : std::max(desc.in, desc.out)) <= most;
}

size_t GatherMmaImageBytes(const WeightView& weight) {
  const GatherImage image = GatherMmaImageOf(weight);
  const int64_t units =
      weight.layout == Layout::kDiagonal
          ? DiagonalUnits(weight, image)
          : ForEachCsrTile(weight, [](int64_t, int64_t, const int64_t*, int64_t) {});
  return image.units_offset + units * kUnitBytes;
}

KernelStatus PackGatherMmaImage(const WeightView& weight, void* packed) try {
  if (!FitsGatherMmaImage({8, weight.out, weight.in, weight.layout, weight.dtype, weight.dtype,
                           weight.block_rows, weight.block_cols, weight.count},
                          false)) {
    return {KernelCode::kUnsupported,
            "gather mma image: needs csr or diagonal(1) of 2-byte values, at most 13,312 columns"};
  }
  const GatherImage image = GatherMmaImageOf(weight);
  char* base = static_cast<char*>(packed);
  std::memset(base, 0, image.units_offset);
  if (weight.layout == Layout::kDiagonal) {
    PackDiagonals<uint16_t>(weight, image, base, SlotOfStart, PlaceOnDiagonal);
  } else {
    PackCsr(weight, image, base);
  }
  return {};
} catch (const std::bad_alloc&) {
  return {KernelCode::kOutOfMemory, "gather mma image: no host memory for lists of entries"};
}

KernelStatus LocateInGatherMmaImage(const WeightView& weight, std::span<const int64_t> elements,
                                    int64_t* offsets) try {
  const GatherImage image = GatherMmaImageOf(weight);
  if (weight.layout == Layout::kDiagonal) {
    LocateOnDiagonals(weight, image, elements, offsets, PlaceOnDiagonal);
  } else {
    LocateInRows(weight, image, elements, offsets);
  }
  return {};
} catch (const std::bad_alloc&) {
  return {KernelCode::kOutOfMemory, "gather mma image: no host memory for lists of entries"};
}

}  // namespace espalier::kernels::cuda
