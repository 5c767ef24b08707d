// classification.h — the k best classes of an output in place of its numbers: Triton's
// classification extension.
//
//   FP32 [batch, classes]  ──k = 3──▶  BYTES [batch, 3]   "15.349566:504:COFFEE MUG" …
//
// An element is value:index, or value:index:label where the model has a label for the index; the
// value has six decimals (a float) or none (an integer). Best first; equal values by index; NaN
// after every number. All dimensions but the batch are one list of classes. With fewer classes than
// k, all of them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/tensor/shape.h"
#include "kernels/base/dtype.h"

namespace espalier::service {

struct Classes {
  Shape shape;
  std::string bytes;  // as BYTES travel raw: each element with its length in four bytes in front
};

// `shape` is that of the whole tensor at `data`; with `batches` its first dimension is the batch.
// InvalidArgument for a datatype that has no order (BOOL).
absl::StatusOr<Classes> BestClasses(DType dtype, const Shape& shape, bool batches,
                                    const std::byte* data, int64_t k,
                                    absl::Span<const std::string> labels);

}  // namespace espalier::service
