// option_timer.h — a device's stopwatch for the options of one layer: the part of measuring that differs by device.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/planner/cost_table.h"
#include "engine/planner/resident_weight.h"
#include "engine/sparse/structure.h"
#include "engine/tensor/cuda_device.h"
#include "engine/tensor/device.h"

namespace espalier::planner {

class OptionTimer {
 public:
  virtual ~OptionTimer() = default;
  // Times `options` of `bucket` side by side, each with its copy of the weight, into Cost::measured (the smaller one
  // stays where there was one). An option whose kernel turns out not to run the problem is marked as such.
  virtual absl::Status Time(CostTable& table, size_t bucket, const std::vector<int>& options,
                            const std::vector<std::shared_ptr<const ResidentWeight>>& weights) = 0;
};

// For batches up to the last bucket of `table`. ResourceExhausted without memory for x and y.
absl::StatusOr<std::unique_ptr<OptionTimer>> MakeCpuTimer(const CostTable& table,
                                                          const sparse::WeightStructure& structure,
                                                          const Device& device);
// CUDA graphs of 20 launches, replayed in turns there and back (ABBA); the median counts.
absl::StatusOr<std::unique_ptr<OptionTimer>> MakeCudaTimer(const CostTable& table,
                                                           const sparse::WeightStructure& structure,
                                                           const CudaDevice& device);

}  // namespace espalier::planner
