// layout_spec.h — a layout with its block shape, printable and parseable: "dense", "csr",
// "block_csr(16)", "block_csr(16x32)", "diagonal(1)". The form used in plans, metrics,
// `espalier inspect` and messages.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/linear/weight_view.h"

namespace espalier::sparse {

using kernels::Layout;

inline constexpr int32_t kMaxBlockSide = 4096;

struct LayoutSpec {
  Layout layout = Layout::kDense;
  int32_t block_rows = 1;
  int32_t block_cols = 1;

  friend bool operator==(const LayoutSpec&, const LayoutSpec&) = default;
};

// A square block prints one side, any other "rows x columns"; dense and csr have no block.
std::string ToString(const LayoutSpec& spec);

// The inverse of ToString ("16x16" is read as 16). InvalidArgument for anything else: no spaces, no
// signs, no leading zeros, sides in [1, kMaxBlockSide], a block where there must be one and none
// elsewhere.
absl::StatusOr<LayoutSpec> ParseLayoutSpec(absl::string_view text);

}  // namespace espalier::sparse
