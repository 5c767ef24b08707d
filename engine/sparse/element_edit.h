// element_edit.h — one element of a tensor that changes: where, from which bits, to which.
#pragma once

#include <cstdint>

namespace espalier::sparse {

struct ElementEdit {
  int64_t position;  // in the tensor, row-major
  uint32_t old_bits, new_bits;

  bool operator==(const ElementEdit&) const = default;
};

}  // namespace espalier::sparse
