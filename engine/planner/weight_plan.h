// weight_plan.h — how a weight would run on a device, without a model around it: the planner's answer to "what if".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/planner/plan.h"
#include "engine/planner/prepared_model.h"
#include "engine/tensor/device.h"
#include "engine/tensor/tensor.h"

namespace espalier::planner {

struct WeightPlanOptions {
  WeightMemory weight_memory = WeightMemory::kBalanced;
  absl::Duration budget;  // for measuring; what is left unmeasured is the cost model's
};

struct WeightPlan {
  double sparsity = 0;
  std::string structure;  // sparse::WeightStructure::found
  std::vector<BucketChoice>
      buckets;  // one for each of `tokens`, as a server with that weight_memory chooses
  // Per bucket, the cheapest that stores no dense matrix, chosen or not; variant empty when none runs.
  std::vector<Candidate> sparse;
  size_t weight_bytes = 0;  // resident, of all copies
  size_t dense_bytes = 0;
};

// Analyses, measures within the budget and chooses for batches of `tokens` (ascending, not empty) rows. W [out, in] is
// multiplied in its own type, or in f32 where the device has no kernel for that. Errors: Unimplemented when no kernel runs
// it, ResourceExhausted without memory.
absl::StatusOr<WeightPlan> PlanWeight(const TensorView& weight, const std::vector<int64_t>& tokens,
                                      const Device& device, const WeightPlanOptions& options);

}  // namespace espalier::planner
