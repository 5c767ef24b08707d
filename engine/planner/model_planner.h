// model_planner.h — plans every linear layer of a program and makes the weights it runs with.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/graph/executor.h"
#include "engine/graph/linear_pairs.h"
#include "engine/graph/program.h"
#include "engine/planner/cost_table.h"
#include "engine/planner/measure.h"
#include "engine/planner/plan.h"
#include "engine/planner/prepared_model.h"
#include "engine/planner/resident_weight.h"
#include "engine/planner/served_form.h"

namespace espalier::planner {

// What a layer runs with in a bucket.
struct PlannedLayer {
  const kernels::LinearVariant* variant = nullptr;
  ResidentWeight* weight = nullptr;  // one of PlannedModel::weights
};

// The resident copies of one of the program's weights.
struct PlannedWeight {
  ServedForm form;
  std::vector<std::shared_ptr<ResidentWeight>> copies;
  int64_t nonzeros = 0;  // when it was planned
  int64_t moved = 0;     // non-zeros that came or went since; one that came and went counts twice
};

// Two layers that run as one kernel in some buckets.
struct PlannedPair {
  graph::LinearPair layers;
  std::vector<bool> in_bucket;
};

struct PlannedModel {
  ModelPlan plan;
  std::vector<int64_t> buckets;
  std::vector<std::vector<PlannedLayer>> layers;        // [bucket][layer]
  std::vector<PlannedWeight> weights;                   // as Program::weights
  std::vector<std::shared_ptr<const CostTable>> costs;  // of each layer: what was chosen by
  std::vector<PlannedPair> pairs;

  // As of now: a weight that is rebuilt has another view, and a pair that it does not fit any more falls apart.
  std::vector<std::vector<graph::LinearBinding>> Bindings() const;
  size_t weight_bytes() const;
  // With resident weights of its own; errors as ResidentWeight::Clone.
  absl::StatusOr<PlannedModel> Clone() const;
};

// The powers of two up to `max_batch_size`, and it; {1} when that is 0.
std::vector<int64_t> BatchBuckets(int64_t max_batch_size);

// Rows of x in each bucket.
std::vector<int64_t> TokensOf(const graph::LinearOp& linear, const std::vector<int64_t>& buckets);

struct ChosenLayer {
  LayerPlan plan;
  std::vector<PlannedLayer> buckets;
  std::vector<std::shared_ptr<ResidentWeight>> copies;  // those it runs with
};
// Packs what ChooseOptions chose for a layer, and tells of it. `about`: names, shape and dense_bytes of it. Sets the table's
// resident_bytes of what it packs; errors as WeightCopies::For.
absl::StatusOr<ChosenLayer> PackChoice(LayerPlan about, const sparse::WeightStructure& structure,
                                       const std::vector<int>& choice,
                                       const std::vector<int64_t>& buckets,
                                       const PrepareOptions& options, CostTable& table,
                                       WeightCopies& copies);

// Analyses, measures (unless deterministic, or known from the cache), chooses and packs. Frees the
// program's dense weights on the way. Errors name the node: Unimplemented when no kernel runs a
// weight, ResourceExhausted without memory. On a GPU the weights become `compute`.
absl::StatusOr<PlannedModel> PlanModel(graph::Program& program, const Device& device,
                                       const PrepareOptions& options,
                                       DType compute = DType::kFloat32);

}  // namespace espalier::planner
