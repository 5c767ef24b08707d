// plan_parameters.h — what a loaded model tells about itself in ModelConfig.parameters, for
// `espalier models` and others.
//
//   key                     value
//   plan                    the whole plan, JSON (planner::ToJson)
//   plan_source             "measured", "cache", "cost model", "deterministic"
//   device                  what it was planned for
//   layouts                 of the linear layers, "diagonal(1) x3, dense x1"; "csr+dense" for two
//   structures              the structure found in their zeros, same form
//   sparsity                share of zeros over all linear layers, 0 to 1, four decimals
//   resident_weight_bytes   weights in memory, in their layouts
//   dense_weight_bytes      the same weights as dense tensors of the file's type
#pragma once

#include "engine/formats/model_config.h"
#include "engine/planner/prepared_model.h"

namespace espalier::runtime {

// The distinct layouts of a layer over its buckets, "csr+dense".
std::string LayoutsOf(const planner::LayerPlan& layer);

// "diagonal(1) x3, dense x1", the most frequent first.
std::string LayoutSummary(const planner::ModelPlan& plan);
std::string StructureSummary(const planner::ModelPlan& plan);

// Share of zeros over all layers; 0 for a plan without layers.
double Sparsity(const planner::ModelPlan& plan);

// Replaces parameters of these names that a config file may have set.
void SetPlanParameters(const planner::PreparedModel& model, inference::ModelConfig& config);

}  // namespace espalier::runtime
