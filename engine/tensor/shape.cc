#include "engine/tensor/shape.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace espalier {

std::string ToString(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<int64_t> ElementCount(absl::Span<const int64_t> shape) {
  constexpr int64_t kLimit = int64_t{1} << 62;
  int64_t count = 1;
  bool empty = false;
  for (int64_t dim : shape) {
    if (dim < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("shape ", ToString(shape), " has a negative dimension"));
    }
    if (dim == 0) {
      empty = true;
      continue;
    }
    // Checked over the non-zero dimensions, so that [0, huge, huge] is refused too.
    if (count > kLimit / dim) {
      return absl::InvalidArgumentError(
          absl::StrCat("shape ", ToString(shape), " has more than 2^62 elements"));
    }
    count *= dim;
  }
  return empty ? 0 : count;
}

}  // namespace espalier
