// structure.h — what the zeros of a weight look like, and what each layout would cost.
//
// AnalyzeStructure reads a dense [out, in] tensor once or twice per question, O(out · in), and answers in one printable
// struct; `espalier inspect` prints it and the planner takes its candidates from it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/sparse/layout_spec.h"
#include "engine/tensor/tensor.h"

namespace espalier::sparse {

struct StructureOptions {
  // Counts subnormals as zeros (see `subnormals`). The caller flushes the weight itself with FlushSubnormals.
  bool flush_subnormals = false;
};

// One way to store the weight exactly.
struct LayoutOption {
  LayoutSpec spec;
  int64_t stored = 0;  // values stored, padding of edge blocks included (dense: out · in)
  size_t bytes = 0;    // values and indices
  double fill = 0;     // non-zeros / values stored that lie inside W
};

struct WeightStructure {
  int64_t out = 0, in = 0;
  DType dtype = DType::kFloat32;
  int64_t nonzeros = 0;
  int64_t negative_zeros = 0;
  int64_t subnormals = 0;  // non-zero to a `!= 0` test, 0 to hardware that flushes; slow where it does not
  int64_t nonfinite = 0;
  int64_t dead_rows = 0, dead_cols = 0;  // all-zero rows and columns
  // Full cyclic diagonals (b = 1): how many offsets hold a non-zero, and whether they hold (nearly) all of them.
  int64_t diagonals = 0;        // offsets with at least one non-zero
  double diagonal_fill = 0;     // nonzeros / (diagonals · min(out, in))
  int64_t diagonal_runs = 0;    // maximal runs of neighbouring offsets
  int64_t longest_run = 0;
  int64_t bandwidth_lower = 0, bandwidth_upper = 0;  // max(row − col), max(col − row) over the non-zeros, ≥ 0
  bool two_of_four = false;     // every aligned group of four columns has at most two non-zeros
  int n_of_m_n = 0, n_of_m_m = 0;  // smallest N for M in {4, 8, 16} with N/M < 1: N:M found; 0:0 when none
  // Every layout considered, smallest first; dense is always in.
  std::vector<LayoutOption> layouts;
  // The structure as a human names it: "diagonal(16)", "block_csr(16)", "2:4", "scattered", "dense".
  std::string found;

  double sparsity() const { return out * in == 0 ? 0.0 : 1.0 - double(nonzeros) / (double(out) * double(in)); }
};

absl::StatusOr<WeightStructure> AnalyzeStructure(const TensorView& dense, const StructureOptions& options = {});

// Bytes that `spec` would take for this weight, without building it.
size_t BytesInLayout(const WeightStructure& structure, const LayoutSpec& spec);

// Replaces subnormal values by zero of the same sign, in place; returns how many.
int64_t FlushSubnormals(Tensor& weight);

}  // namespace espalier::sparse
