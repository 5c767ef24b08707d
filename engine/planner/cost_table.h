// cost_table.h — every way to run one layer, and what each costs at each batch bucket.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "engine/sparse/structure.h"
#include "engine/tensor/device.h"
#include "kernels/linear/linear.h"

namespace espalier::planner {

// A layout that holds the weight exactly, and a kernel that reads it.
struct LayerOption {
  sparse::LayoutOption layout;
  const kernels::LinearVariant* variant = nullptr;
  // In memory, in this layout and the variant's packing. Until the weight has been packed: the
  // layout's own bytes.
  size_t resident_bytes = 0;

  bool is_dense() const { return layout.spec.layout == kernels::Layout::kDense; }
};

// Whether two options read the very same bytes.
bool SharesMemory(const LayerOption& a, const LayerOption& b);

inline constexpr double kCannotRun = std::numeric_limits<double>::infinity();

struct Cost {
  double predicted = kCannotRun;  // by the cost model, µs
  double measured = 0;            // µs; 0: not measured, kCannotRun: tried, and refused
  double micros = kCannotRun;     // what to choose by: measured, or predicted and calibrated
};

struct CostTable {
  std::vector<LayerOption> options;
  std::vector<int64_t> tokens;           // per bucket, ascending
  std::vector<std::vector<Cost>> costs;  // [bucket][option]
  // What measuring one option in one bucket takes: so many calls of it, and at least so many µs.
  double measuring_calls = 6;
  double measuring_least_micros = 400;
  // How much slower than dense counts as no slower. On a CPU kernels of a few µs measure that much
  // apart from one start to the next, depending on whether a second thread was there to help (512 x
  // 784 dense, one token: 7 to 16 µs); ruled out by that, 95 % sparse layers stayed dense that csr
  // runs 2-5 times as fast from 8 tokens on. Replays of GPU graphs repeat within 3 %.
  double slack_micros = 3;

  // Of the fastest dense option.
  double DenseMicros(size_t bucket) const;
  // Fills Cost::micros: a measured cost is taken as it is; an unmeasured one is predicted · the
  // error of the model for that option at the nearest bucket where it was measured, or · the
  // largest error seen, for an option that was never measured (it was ruled out by its prediction,
  // and must not win because this machine is slower than the one the model's constants are from).
  void Calibrate();
  // The same where nothing was measured, by the errors of the model for the same weight when it had another structure; the
  // buckets are the same.
  void CalibrateLike(const CostTable& before);
};

// The problem `option` solves at `tokens`.
kernels::LinearDesc DescOf(const LayerOption& option, const sparse::WeightStructure& structure,
                           int64_t tokens);

// All options for a weight on `device`, pruned by the rules in cost_table.cc, with predictions. A
// dense option is always there when a dense kernel for the weight's type exists.
CostTable ListOptions(const sparse::WeightStructure& structure, std::vector<int64_t> tokens,
                      const Device& device);

// What x and y are beside a weight of `dtype`: f32 on the CPU, the same on a GPU.
DType IoTypeOf(DType dtype, const Device& device);

// Whether `device` multiplies by a dense weight [out, in] of `dtype`.
bool HasDenseKernel(DType dtype, int64_t out, int64_t in, const Device& device);

}  // namespace espalier::planner
