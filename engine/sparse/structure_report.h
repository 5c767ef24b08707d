// structure_report.h — the text table and the JSON of `espalier inspect`: pure functions from named
// structures to strings.
#pragma once

#include <string>

#include "absl/types/span.h"
#include "engine/sparse/structure.h"

namespace espalier::sparse {

struct NamedStructure {
  std::string name;  // of the tensor, as in the model file: untrusted
  WeightStructure structure;
};

// One line a tensor (shape, type, sparsity, structure found, diagonals, dead rows and columns,
// −0.0, subnormals, N:M), below it the bytes it takes dense, in csr, and in every layout that is
// smaller than dense and among the kReportedPerLayout best of its kind, smallest first, the best
// marked '*'; then notes on what slows a weight down or hides a structure, and totals. Names are
// escaped to ASCII, so a model file cannot drive the terminal.
inline constexpr int kReportedPerLayout = 2;
std::string StructureTable(absl::Span<const NamedStructure> tensors);

// {"tensors": [{"name", "out", "in", "dtype", …every field of WeightStructure…, "layouts":
// [{"layout", "count", "stored", "bytes", "fill"}]}], "dense_bytes", "best_bytes"}. Bytes of a name
// that are not UTF-8 become U+FFFD.
std::string StructureJson(absl::Span<const NamedStructure> tensors);

// "812 B", "1.5 KiB", "64.0 MiB": the largest unit of which there is at least one.
std::string HumanBytes(size_t bytes);

}  // namespace espalier::sparse
