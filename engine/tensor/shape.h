// shape.h — dimensions of a tensor. A dimension of kBatch (-1) stands for the batch size, known per request.
#pragma once

#include <cstdint>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace espalier {

inline constexpr int64_t kBatch = -1;

using Shape = absl::InlinedVector<int64_t, 4>;

// "[-1, 784]".
std::string ToString(absl::Span<const int64_t> shape);

// Product of the dimensions. InvalidArgument for a negative dimension or a product above 2^62, so that a hostile shape
// can neither overflow nor turn into a small allocation.
absl::StatusOr<int64_t> ElementCount(absl::Span<const int64_t> shape);

}  // namespace espalier
