// plan_drift.h — weights whose non-zeros moved so far that the planner is asked again.
//
//   WeightEditor counts ──▶ DriftedWeights ──▶ PlanAnew: structure, costs, choice ──▶ packed anew, or left as it is
//
// Costs are those that the plan cache knows of the new pattern; else predicted ones, corrected by what was measured of the
// same kernels before. Nothing is measured: this happens beside requests.
//
// Memory   One weight at a time: dense, and in its new layouts beside its old ones.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "engine/formats/weight_source.h"
#include "engine/planner/model_planner.h"
#include "engine/planner/prepared_model.h"

namespace espalier::planner {

// Of the non-zeros that a weight had when it was planned, what moves before it is planned again. What a kernel costs follows
// what it stores, about linearly, and the planner takes 5 % for no difference (TolerableMicros): less than a tenth hardly
// changes a choice, and asking reads the weight, which takes as long as building it anew.
inline constexpr double kDriftShare = 0.1;

// Indices into Program::weights.
std::vector<int> DriftedWeights(const PlannedModel& planned);

// Whether a layer runs, in every bucket, with the layout and kernel that `choice` names.
bool RunsWith(const PlannedModel& planned, int layer, const CostTable& table,
              const std::vector<int>& choice);

struct PlannedAnew {
  PlannedModel
      planned;  // shares what stayed with the one before; its plan.weight_bytes are that one's still
  WeightReplan replan;
};
// Plans the layers of one weight by what it is in `now`, as a load would. They are packed anew when another layout or kernel
// is chosen, or when edits left kDriftShare more stored than the weight has. Pairs of such a layer fall apart. Errors are
// those of reading `now`, and ResourceExhausted.
absl::StatusOr<PlannedAnew> PlanAnew(const graph::Program& program, const PlannedModel& planned,
                                     const Device& device, const PrepareOptions& options,
                                     int weight, const formats::WeightSource& now);

}  // namespace espalier::planner
