// tiling.h — how dense weights are packed, and how a problem is cut into tasks. Shared by packing and by the kernels
// that read the packed form: our own of every instruction set, and oneDNN's.
//
//   packed = [tile of kDenseTileRows rows][column, padded to a multiple of 16][row of the tile]
//
// The last tile is as wide as its rows, rounded up to 16; the padding is zero. So the tile that starts at `row` begins at
// element row · padded_in, and the values of one column lie side by side, as vectors. oneDNN calls the same bytes
// BA16a64b (BA16a16b, BA16a32b, BA16a48b for the last tile) of the transposed weight; it is what it asks for with
// format_tag::any at 1 to 256 tokens where it has AVX-512.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/linear/linear.h"

namespace espalier::kernels {

inline constexpr int64_t kDenseTileRows = 64;

class DenseTiling {
 public:
  DenseTiling(int64_t out, int64_t in) : out_(out), padded_in_((in + 15) / 16 * 16) {}

  int64_t padded_in() const { return padded_in_; }
  int64_t tiles() const { return (out_ + kDenseTileRows - 1) / kDenseTileRows; }
  int64_t Rows(int64_t tile) const {
    return std::min(kDenseTileRows, out_ - tile * kDenseTileRows);
  }
  int64_t Width(int64_t tile) const { return (Rows(tile) + 15) / 16 * 16; }
  int64_t Start(int64_t tile) const { return tile * kDenseTileRows * padded_in_; }  // in elements
  int64_t elements() const { return (out_ + 15) / 16 * 16 * padded_in_; }

 private:
  int64_t out_;
  int64_t padded_in_;
};

// One task a thread: by tiles while there are enough of them, by tokens as well where there are not.
struct DenseTasks {
  struct Part {
    int64_t tile, tile_end, token, token_end;
  };

  DenseTasks(const LinearDesc& desc, int threads)
      : tiles(DenseTiling(desc.out, desc.in).tiles()),
        tokens(desc.tokens),
        by_tile(std::min<int64_t>(tiles, std::max(1, threads))),
        by_token(std::clamp<int64_t>(threads / by_tile, 1, std::max<int64_t>(1, tokens / 8))) {}

  int64_t count() const { return by_tile * by_token; }
  Part Of(int64_t task) const {
    const int64_t a = task % by_tile, b = task / by_tile;
    return {tiles * a / by_tile, tiles * (a + 1) / by_tile, tokens * b / by_token,
            tokens * (b + 1) / by_token};
  }

  int64_t tiles, tokens, by_tile, by_token;
};

}  // namespace espalier::kernels
