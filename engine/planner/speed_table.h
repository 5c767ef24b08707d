// speed_table.h — how fast sparse layers were on a device that is not here: measurements that came with the build, and
// predictions from them.
//
//   µs(query) = model(query) · exp(Σ wᵢ · ln(measuredᵢ / model(rowᵢ)) / Σ wᵢ),   wᵢ = 1 / (distanceᵢ² + ε)
//
// `model` is the planner's cost model; the rows with the query's pattern and type correct it, the nearest most. Distance is
// counted in doublings: of tokens, of density, of in and of out. Dense is predicted in the same way from all rows of the
// type. A table is generated from committed bench results (tests/bench/speed_table.py), never typed.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/planner/weight_plan.h"
#include "engine/sparse/pattern.h"
#include "kernels/base/dtype.h"

namespace espalier::planner {

// The fastest form of one weight that stores no dense matrix, beside the fastest dense product.
struct SpeedRow {
  const char* pattern;  // sparse::ToString(Pattern)
  DType dtype;
  double sparsity;
  int64_t tokens, out, in;
  double micros, dense_micros;
  int64_t weight_bytes;
};

// A result file: what was run, on which commit, when.
struct SpeedSource {
  const char* file;
  const char* commit;
  const char* date;
};

struct SpeedTable {
  const char* name;    // "h200"
  const char* device;  // "NVIDIA H200, driver CUDA 13.0"
  std::span<const SpeedSource> sources;
  std::span<const SpeedRow> rows;
};

// All tables of this build.
std::span<const SpeedTable> SpeedTables();
// Null when there is none of that name.
const SpeedTable* FindSpeedTableOrNull(absl::string_view name);

struct SpeedQuery {
  sparse::Pattern pattern;
  DType dtype = DType::kBFloat16;
  double sparsity = 0;
  int64_t out = 0, in = 0;
};

struct SpeedPrediction {
  WeightPlan plan;        // nothing in it is measured
  double doublings = 0;   // how far the nearest measurement is, at the batch where that is furthest
  SpeedRow nearest = {};  // that measurement
};

// What a server with that weight_memory would choose for batches of `tokens` (not empty) rows, were the predictions right.
// NotFound, naming what was measured, when the table has no row of the pattern and type. Rows of blocks and of diagonals of
// the same block stand in for each other: the same kernels run them; f16 is taken as bf16, and 2:4 without rows of its own
// as unstructured with as many values.
absl::StatusOr<SpeedPrediction> PredictPlan(const SpeedTable& table, const SpeedQuery& query,
                                            const std::vector<int64_t>& tokens, WeightMemory mode);

// How far predictions are off: every row predicted from all others, as a factor (1.2: a fifth too much or too little), by
// which half, and nine tenths, of the predicted gains over dense are off at most.
struct SpeedError {
  double half = 1, nine_tenths = 1;
};
SpeedError SpeedTableError(const SpeedTable& table);

}  // namespace espalier::planner
