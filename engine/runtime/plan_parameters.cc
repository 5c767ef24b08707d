#include "engine/runtime/plan_parameters.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace espalier::runtime {
namespace {

// {"a", "b", "a"} → "a x2, b x1".
std::string CountSummary(const std::vector<std::string>& values) {
  std::map<std::string, int> counts;
  for (const std::string& value : values) ++counts[value];
  std::vector<std::pair<std::string, int>> sorted(counts.begin(), counts.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  return absl::StrJoin(sorted, ", ", absl::PairFormatter(" x"));
}

}  // namespace

std::string LayoutsOf(const planner::LayerPlan& layer) {
  std::vector<std::string> layouts;
  for (const planner::BucketChoice& bucket : layer.buckets) {
    std::string layout = sparse::ToString(bucket.chosen.spec);
    if (std::find(layouts.begin(), layouts.end(), layout) == layouts.end())
      layouts.push_back(std::move(layout));
  }
  return absl::StrJoin(layouts, "+");
}

std::string LayoutSummary(const planner::ModelPlan& plan) {
  std::vector<std::string> layouts;
  for (const planner::LayerPlan& layer : plan.layers) layouts.push_back(LayoutsOf(layer));
  return CountSummary(layouts);
}

std::string StructureSummary(const planner::ModelPlan& plan) {
  std::vector<std::string> structures;
  for (const planner::LayerPlan& layer : plan.layers) structures.push_back(layer.structure);
  return CountSummary(structures);
}

double Sparsity(const planner::ModelPlan& plan) {
  double zeros = 0, all = 0;
  for (const planner::LayerPlan& layer : plan.layers) {
    const double elements = static_cast<double>(layer.out) * static_cast<double>(layer.in);
    zeros += layer.sparsity * elements;
    all += elements;
  }
  return all > 0 ? zeros / all : 0;
}

void SetPlanParameters(const planner::PreparedModel& model, inference::ModelConfig& config) {
  const planner::ModelPlan& plan = model.plan();
  const std::pair<const char*, std::string> values[] = {
      {"plan", planner::ToJson(plan)},
      {"plan_source", plan.source},
      {"device", plan.device},
      {"layouts", LayoutSummary(plan)},
      {"structures", StructureSummary(plan)},
      {"sparsity", absl::StrFormat("%.4f", Sparsity(plan))},
      {"resident_weight_bytes", absl::StrCat(model.weight_bytes())},
      {"dense_weight_bytes", absl::StrCat(model.dense_weight_bytes())},
  };
  for (const auto& [key, value] : values)
    (*config.mutable_parameters())[key].set_string_value(value);
}

}  // namespace espalier::runtime
