// structure.h — what the zeros of a weight look like, and what each layout would cost.
//
// AnalyzeStructure reads a dense [out, in] tensor once, into a map of one bit per element, and answers
// from that map in one printable struct: 0.13–0.21 s for 10,000 × 10,000, whatever is in it (one core
// of an AMD EPYC Zen 5, 2026-12).
// `espalier inspect` prints it (structure_report.h) and the planner takes its candidates from it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/sparse/layout_spec.h"
#include "engine/tensor/tensor.h"

namespace espalier::sparse {

struct StructureOptions {
  // Counts subnormals as zeros (see `subnormals`). The caller flushes the weight itself with
  // FlushSubnormals.
  bool flush_subnormals = false;
};

// One way to store the weight exactly.
struct LayoutOption {
  LayoutSpec spec;
  int64_t count = 0;   // as WeightView::count: non-zeros, blocks or offsets
  int64_t stored = 0;  // values stored, padding of edge blocks included (dense: out · in)
  size_t bytes = 0;    // values and indices, of block_csr as a CPU holds them (BlockCsrLinearCpu)
  double fill = 0;     // non-zeros / values stored that lie inside W; 1 when none is stored
};

struct WeightStructure {
  int64_t out = 0, in = 0;
  DType dtype = DType::kFloat32;
  int64_t nonzeros = 0;
  int64_t negative_zeros = 0;
  // Non-zero to a `!= 0` test, 0 to hardware that flushes; slow where it does not.
  int64_t subnormals = 0;
  int64_t nonfinite = 0;
  int64_t dead_rows = 0, dead_cols = 0;  // all-zero rows and columns

  // Cyclic diagonals of single elements (weight_view.h, b = 1).
  int64_t diagonals = 0;      // offsets with at least one non-zero
  double diagonal_fill = 0;   // nonzeros / (diagonals · min(out, in)); 0 when there is none
  int64_t diagonal_runs = 0;  // maximal runs of neighbouring offsets; the last offset neighbours 0
  int64_t longest_run = 0;
  // Largest power of two b ≤ 128 such that the offsets are whole runs [m·b, (m + 1)·b); 1: none.
  int64_t aligned_run = 1;
  // max(row − col) and max(col − row) over the non-zeros, ≥ 0.
  int64_t bandwidth_lower = 0, bandwidth_upper = 0;

  // Every aligned group of four columns has at most two non-zeros.
  bool two_of_four = false;
  // No aligned group of M columns has more than N non-zeros: the N:M with the smallest N/M < 1 over
  // M in {4, 8, 16} up to `in`, the smaller M on a tie; 0:0 when there is none. A bound: `found` says whether
  // it is the structure.
  int n_of_m_n = 0, n_of_m_m = 0;

  // Every layout considered, smallest first; dense is always in.
  std::vector<LayoutOption> layouts;

  // The structure as a human names it; the coarsest that accounts for the zeros (structure.cc):
  // "zero", "diagonal(16)", "block_csr(16)", "diagonal(1)", "dead units" (whole rows and columns),
  // "band(-1..2)" (col − row), "2:4", "scattered", "dense".
  std::string found;

  double sparsity() const {
    return out * in == 0 ? 0.0 : 1.0 - double(nonzeros) / (double(out) * double(in));
  }
};

// InvalidArgument for what SparseWeight::FromDense refuses.
absl::StatusOr<WeightStructure> AnalyzeStructure(const TensorView& dense,
                                                 const StructureOptions& options = {});

// Bytes that `spec` would take for this weight, without building it; nullopt when `spec` is not
// among structure.layouts.
std::optional<size_t> BytesInLayout(const WeightStructure& structure, const LayoutSpec& spec);

// Replaces subnormal values by zero of the same sign, in place; returns how many. Leaves dtypes
// other than f32, bf16 and f16 alone.
int64_t FlushSubnormals(Tensor& weight);

}  // namespace espalier::sparse
