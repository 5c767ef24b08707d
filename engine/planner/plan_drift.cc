#include "engine/planner/plan_drift.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/graph/ops/linear.h"
#include "engine/planner/choose.h"
#include "engine/planner/digest.h"
#include "engine/planner/plan_cache.h"
#include "engine/sparse/structure.h"

namespace espalier::planner {
namespace {

double ShareMoved(const PlannedWeight& weight) {
  return static_cast<double>(weight.moved) /
         static_cast<double>(std::max<int64_t>(weight.nonzeros, 1));
}

absl::StatusOr<std::shared_ptr<const Tensor>> ReadWeight(const graph::Program& program, int weight,
                                                         const ServedForm& form,
                                                         const formats::WeightSource& now) {
  for (const auto& [name, initializer] : program.initializers) {
    for (const auto& use : initializer.weights) {
      if (use.index == weight) return ReadServed(now, name, initializer, use.transposed, form);
    }
  }
  return absl::InternalError("it comes from no initializer");
}

// The layouts of a weight's layers, "csr+dense".
std::string LayoutsOf(const PlannedModel& planned, const std::vector<int>& layers) {
  std::vector<std::string> layouts;
  for (const auto& bucket : planned.layers) {
    for (const int layer : layers) {
      std::string layout = sparse::ToString(bucket[layer].weight->spec());
      if (std::find(layouts.begin(), layouts.end(), layout) == layouts.end())
        layouts.push_back(std::move(layout));
    }
  }
  return absl::StrJoin(layouts, "+");
}

// Whether edits left so many zeros where they are stored that encoding the weight anew is worth it.
bool StoresTooMuch(const PlannedModel& planned, int layer, const CostTable& table,
                   const std::vector<int>& choice) {
  for (size_t b = 0; b < choice.size(); ++b) {
    const auto stored = static_cast<double>(planned.layers[b][layer].weight->view().count);
    const auto needed = static_cast<double>(table.options[choice[b]].layout.count);
    if (stored > (1 + kDriftShare) * needed) return true;
  }
  return false;
}

void TakeApart(PlannedModel& planned, int layer) {
  for (PlannedPair& pair : planned.pairs) {
    if (pair.layers.first != layer && pair.layers.second != layer) continue;
    pair.in_bucket.assign(pair.in_bucket.size(), false);
    for (BucketChoice& bucket : planned.plan.layers[pair.layers.second].buckets)
      bucket.paired.clear();
  }
}

// A layer of the weight, and what would be chosen for it now.
struct Layer {
  int index = 0;
  CostTable table;
  std::vector<int> choice;
};

}  // namespace

std::vector<int> DriftedWeights(const PlannedModel& planned) {
  std::vector<int> drifted;
  for (size_t i = 0; i < planned.weights.size(); ++i) {
    if (planned.weights[i].moved > 0 && ShareMoved(planned.weights[i]) >= kDriftShare)
      drifted.push_back(static_cast<int>(i));
  }
  return drifted;
}

bool RunsWith(const PlannedModel& planned, int layer, const CostTable& table,
              const std::vector<int>& choice) {
  if (choice.empty()) return false;
  for (size_t b = 0; b < choice.size(); ++b) {
    const PlannedLayer& runs = planned.layers[b][layer];
    const LayerOption& chosen = table.options[choice[b]];
    if (chosen.variant != runs.variant || !(chosen.layout.spec == runs.weight->spec()))
      return false;
  }
  return true;
}

absl::StatusOr<PlannedAnew> PlanAnew(const graph::Program& program, const PlannedModel& planned,
                                     const Device& device, const PrepareOptions& options,
                                     int weight, const formats::WeightSource& now) {
  PlannedAnew anew = {planned, {}};
  PlannedWeight& own = anew.planned.weights[weight];
  anew.replan = {.weight = program.weights[weight].name, .moved = ShareMoved(own)};
  const auto dense = ReadWeight(program, weight, own.form, now);
  if (!dense.ok()) return dense.status();
  const auto structure = sparse::AnalyzeStructure((*dense)->view());
  if (!structure.ok()) return structure.status();
  own.nonzeros = structure->nonzeros;
  own.moved = 0;

  const PlanCache cache(options.plan_cache_dir, device);
  const std::string key = cache.KeyOf(PatternDigest((*dense)->view()));
  std::vector<Layer> layers;
  std::vector<int> indices;
  bool stays = true, fits = true;
  for (const graph::LinearOp* linear : program.linears) {
    if (linear->weight() != weight) continue;
    Layer layer = {
        linear->layer(), ListOptions(*structure, TokensOf(*linear, planned.buckets), device), {}};
    if (const auto known = cache.Load(key, layer.table); !known.ok() || !*known)
      layer.table.CalibrateLike(*planned.costs[layer.index]);
    layer.choice =
        ChooseOptions(layer.table, options.weight_memory, options.deterministic, (*dense)->bytes());
    if (layer.choice.empty()) return absl::UnimplementedError("no kernel multiplies by it");
    stays = stays && RunsWith(planned, layer.index, layer.table, layer.choice);
    fits = fits && stays && !StoresTooMuch(planned, layer.index, layer.table, layer.choice);
    indices.push_back(layer.index);
    layers.push_back(std::move(layer));
  }
  anew.replan.before = anew.replan.after = LayoutsOf(planned, indices);
  if (stays && fits) return anew;

  anew.replan.changed = true;
  own.copies.clear();
  WeightCopies copies((*dense)->view(), device.AsCudaOrNull());
  for (Layer& layer : layers) {
    LayerPlan& plan = anew.planned.plan.layers[layer.index];
    auto chosen =
        PackChoice({.name = plan.name,
                    .weight = plan.weight,
                    .out = plan.out,
                    .in = plan.in,
                    .dense_bytes = plan.dense_bytes},
                   *structure, layer.choice, planned.buckets, options, layer.table, copies);
    if (!chosen.ok()) return chosen.status();
    for (size_t b = 0; b < planned.buckets.size(); ++b)
      anew.planned.layers[b][layer.index] = chosen->buckets[b];
    for (auto& copy : chosen->copies) {
      if (std::find(own.copies.begin(), own.copies.end(), copy) == own.copies.end())
        own.copies.push_back(std::move(copy));
    }
    plan = std::move(chosen->plan);
    anew.planned.costs[layer.index] = std::make_shared<const CostTable>(std::move(layer.table));
    TakeApart(anew.planned, layer.index);
  }
  anew.replan.after = LayoutsOf(anew.planned, indices);
  return anew;
}

}  // namespace espalier::planner
