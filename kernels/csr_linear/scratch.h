// scratch.h — memory and shares of a run of csr_linear, the same for every instruction set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/linear/linear.h"

namespace espalier::kernels {

// Columns of x that a tile takes (64 KiB at any panel width) and rows that go through them before the
// next tile: their sums, 64 KiB with 64 tokens, and their part of the weight stay in L2. Narrower tiles
// fit L1 but pay a mispredicted branch for fewer values; measured for 4096 x 4096, 90 %, 64 tokens
// (Zen 5, one core): 16 KiB 4.6 ms, 32 KiB 3.5 ms, 64 KiB 2.6 ms, 256 KiB 2.9 ms.
inline constexpr int64_t kCsrTileBytes = 64 * 1024;
inline constexpr int64_t kCsrRowBlock = 256;

// Tokens of the widest panel: four AVX-512 vectors.
inline constexpr int64_t kCsrPanelTokens = 64;
inline constexpr int64_t kCsrTaskTileBytes = kCsrRowBlock * kCsrPanelTokens * 4;

struct CsrScratch {
  CsrScratch(const LinearDesc& desc, int threads) : tasks(std::max(1, threads)) {
    const int64_t tokens = (desc.tokens + kCsrPanelTokens - 1) / kCsrPanelTokens * kCsrPanelTokens;
    panels_bytes = tokens * desc.in * 4;
    task_bytes = kCsrTaskTileBytes + kCsrRowBlock * 4;
  }
  size_t total_bytes() const { return panels_bytes + tasks * task_bytes; }

  int64_t tasks;
  int64_t panels_bytes, task_bytes;
};

// Rows [CsrBoundary(w, i, n), CsrBoundary(w, i + 1, n)) are the i-th of n shares of equal work.
inline int64_t CsrBoundary(const WeightView& w, int64_t i, int64_t n) {
  if (i == n) return w.out;
  const int64_t share = w.count * i / n;
  return std::lower_bound(w.row_ptr, w.row_ptr + w.out, static_cast<int32_t>(share)) - w.row_ptr;
}

}  // namespace espalier::kernels
