// device_forms.h — a program made ready for a GPU: which type its floats are computed in, how rows lie in memory, and
// conversions where a step needs another form than the value before it has.
//
//   activations   the floats become `compute`; integers stay. What only linear layers and conversions touch lies in rows
//                 at a stride of round_up(width, 64) elements, everything else back to back.
//   linear        reads and writes `compute` at row strides that are multiples of 8: inputs, outputs and odd widths that
//                 other steps share get a conversion before or after it, one for all that read a value in that form.
//   others        read and write `compute` back to back; arithmetic with broadcasting takes any float as it comes.
#pragma once

#include "engine/graph/program.h"

namespace espalier::graph {

inline constexpr int64_t kRowAlignment = 64;

constexpr int64_t RowStrideOf(int64_t width) {
  return (width + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

// `compute` is kFloat32, kBFloat16 or kFloat16.
void PrepareForDevice(Program& program, DType compute);

}  // namespace espalier::graph
