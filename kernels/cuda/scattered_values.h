// scattered_values.h — the stored values of csr and diagonal(1) weights, row by row, for packers.
#pragma once

#include <cstdint>

#include "kernels/linear/linear.h"

namespace espalier::kernels::cuda {

// visit(row, column, index into values) for every stored value of the rows [first, last).
template <typename Visit>
void ForEachValueInRows(const WeightView& w, int64_t first, int64_t last, Visit visit) {
  if (w.layout == Layout::kCsr) {
    for (int64_t row = first; row < last; ++row) {
      for (int32_t i = w.row_ptr[row]; i < w.row_ptr[row + 1]; ++i) {
        visit(row, int64_t{w.col_idx[i]}, int64_t{i});
      }
    }
    return;
  }
  const int64_t length = w.diagonal_length();
  const bool is_tall = w.out >= w.in;
  for (int64_t k = 0; k < w.count; ++k) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t column =
          is_tall ? (row - w.offsets[k] + w.out) % w.out : (row + w.offsets[k]) % w.in;
      if (column < w.in) visit(row, column, k * length + (is_tall ? column : row));
    }
  }
}

}  // namespace espalier::kernels::cuda
