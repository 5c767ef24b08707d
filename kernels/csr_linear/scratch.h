// scratch.h — memory and shares of a run of csr_linear, the same for every instruction set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/linear/linear.h"

namespace espalier::kernels {

// Rows whose sums stay in L2 while columns go by, and columns of x (at any panel width) that stay in
// L1 (48 KiB) meanwhile: 1024 rows of 64 tokens are 256 KiB, 128 columns 32 KiB.
inline constexpr int64_t kCsrRowBlock = 1024;
inline constexpr int64_t kCsrTileBytes = 32 * 1024;

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

// As many tasks as threads, but none below some 20 µs of work: 2^18 multiplications.
inline int64_t CsrTasks(const LinearDesc& desc, int threads) {
  const int64_t worth = 1 + (desc.count * desc.tokens >> 18);
  return std::min<int64_t>({std::max(1, threads), worth, desc.out});
}

// Rows [CsrBoundary(w, i, n), CsrBoundary(w, i + 1, n)) are the i-th of n shares of equal work.
inline int64_t CsrBoundary(const WeightView& w, int64_t i, int64_t n) {
  if (i == n) return w.out;
  const int64_t share = w.count * i / n;
  return std::lower_bound(w.row_ptr, w.row_ptr + w.out, static_cast<int32_t>(share)) - w.row_ptr;
}

}  // namespace espalier::kernels
