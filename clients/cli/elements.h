// elements.h — the elements of a received tensor: as numbers, as text, as JSON, ranked.
//
// FP16 and BF16 read as the float that they are exactly. BYTES have text but no number.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "clients/cli/json_writer.h"
#include "clients/cpp/tensor.h"

namespace espalier::cli {

// InvalidArgument for BYTES.
absl::StatusOr<std::vector<double>> Numbers(const client::Tensor& tensor);
// Elements [first, first + count), which must exist.
std::vector<std::string> Texts(const client::Tensor& tensor, int64_t first, int64_t count);
// All elements, flat and row-major, as values of the open array.
void WriteElements(const client::Tensor& tensor, JsonWriter& json);

// The tensor as items (first dimension) of `item_size` elements; a scalar is one item of one.
struct Items {
  int64_t count = 0, item_size = 0;
  static Items Of(const client::Tensor& tensor);
};

// Indices of the `k` largest of the `size` values, largest first, equal ones in order; NaN ranks
// last.
std::vector<int64_t> TopIndices(const double* values, int64_t size, int64_t k);

}  // namespace espalier::cli
