// put_at_position.h — what a position of x (gather_image.h) stands for, for tests that unpack scattered weights.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "kernels/cuda/gather_image.h"
#include "tests/kernels/cuda/random_weight.h"

namespace espalier::kernels::testing {

// Adds value at (row, position), which must be zero where the position holds no column or the row is beyond the last.
inline void PutAtPosition(const RandomWeightSpec& spec, const cuda::GatherImage& layout,
                          int64_t row, int64_t position, uint16_t value,
                          std::vector<uint16_t>* dense) {
  ASSERT_LT(position, layout.positions);
  const int64_t column = position % layout.modulus;
  if (position >= layout.wrapped || column >= spec.in || row >= spec.out) {
    ASSERT_EQ(value, 0) << "row " << row << " position " << position;
    return;
  }
  if (value != 0) (*dense)[row * spec.in + column] = value;
}

}  // namespace espalier::kernels::testing
