// advice.h — what `espalier advise` found out, and what follows from it. Pure: no clock, no device, so that every rule is a
// unit test.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/planner/plan.h"
#include "engine/sparse/pattern.h"

namespace espalier::cli {

// One batch size of a layer pruned in one way: what would run, and dense.
struct AdviceBatch {
  int64_t batch = 0;  // rows of x
  planner::Candidate chosen;
  planner::Candidate
      sparse;  // the cheapest that stores no dense matrix, chosen or not; variant empty when there is none
  double dense_micros = 0;
};

// One way to prune one layer, or all of them.
struct AdvicePoint {
  sparse::Pattern pattern;
  double asked = 0;  // the sparsity of the command line; 2:4: 0.5
  double zeros = 0;  // what the pattern came to
  std::vector<AdviceBatch> batches;
  double weight_bytes = 0, dense_bytes = 0;
  // Share of the weight's sum of squares that magnitude pruning leaves; below 0 without weights.
  double kept = -1;

  double Gain(size_t batch) const;  // over dense
  double Gain() const;              // geometric mean over the batches
};

// Layers of one shape, all pruned in the same ways.
struct AdviceLayer {
  int64_t out = 0, in = 0;
  int64_t count = 1;
  std::vector<AdvicePoint> points;
};

struct Advice {
  std::string device;
  std::string source;  // "measured" or "predicted"
  std::string basis;   // where the numbers come from, for people
  std::string commit, date;
  std::string precision, weight_memory;
  double wanted = 2;  // gain
  std::vector<AdviceLayer> layers;
};

// The points of all layers together, one for each way to prune: micros and bytes are sums over layers and their counts.
std::vector<AdvicePoint> Together(const std::vector<AdviceLayer>& layers);

// A gain below this is not worth an accuracy.
inline constexpr double kWorthPruning = 1.1;

// The index of the point to prune to, of those that reach `wanted`: the one that keeps the most of the weights where that is
// known, else the one with the lowest sparsity asked for (either costs the least accuracy), and of equals the fastest. The
// fastest of all when none reaches it; −1 when even that stays below kWorthPruning.
int Recommend(const std::vector<AdvicePoint>& points, double wanted);

std::string AdviceTable(const Advice& advice);  // ends with the recommendation in words
std::string AdviceJson(const Advice& advice);

}  // namespace espalier::cli
