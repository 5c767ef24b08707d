#include "engine/planner/weight_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/planner/choose.h"
#include "engine/planner/cost_table.h"
#include "engine/planner/measure.h"
#include "engine/sparse/structure.h"

namespace espalier::planner {
namespace {

Candidate CheapestSparse(const CostTable& table, size_t bucket) {
  int best = -1;
  for (int i = 0; i < static_cast<int>(table.options.size()); ++i) {
    const double micros = table.costs[bucket][i].micros;
    if (table.options[i].is_dense() || micros == kCannotRun) continue;
    if (best < 0 || micros < table.costs[bucket][best].micros) best = i;
  }
  return best < 0 ? Candidate() : DescribeOption(table, bucket, best);
}

}  // namespace

absl::StatusOr<WeightPlan> PlanWeight(const TensorView& weight, const std::vector<int64_t>& tokens,
                                      const Device& device, const WeightPlanOptions& options) {
  TensorView served = weight;
  Tensor converted;
  if (weight.shape.size() == 2 &&
      !HasDenseKernel(weight.dtype, weight.shape[0], weight.shape[1], device)) {
    auto copy = Convert(weight, DType::kFloat32);
    if (!copy.ok()) return copy.status();
    converted = *std::move(copy);
    served = converted.view();
  }
  auto structure = sparse::AnalyzeStructure(served);
  if (!structure.ok()) return structure.status();
  CostTable table = ListOptions(*structure, tokens, device);
  WeightCopies copies(served, device.AsCudaOrNull());
  auto measured = Measure(table, *structure, copies, device, absl::Now() + options.budget);
  if (!measured.ok()) return measured.status();
  const size_t served_bytes = served.elements() * SizeOf(served.dtype);
  const std::vector<int> choice =
      ChooseOptions(table, options.weight_memory, /*deterministic=*/false, served_bytes);
  if (choice.empty()) {
    return absl::UnimplementedError(absl::StrCat("no kernel of ", device.Description(),
                                                 " multiplies by a weight ", ToString(weight.shape),
                                                 " of ", NameOf(weight.dtype)));
  }
  WeightPlan plan;
  plan.sparsity = structure->sparsity();
  plan.structure = structure->found;
  plan.dense_bytes = weight.elements() * SizeOf(weight.dtype);
  std::vector<std::shared_ptr<const ResidentWeight>> used;
  for (const int option : choice) {
    auto resident = copies.For(table.options[option]);
    if (!resident.ok()) return resident.status();
    table.options[option].resident_bytes = (*resident)->bytes();
    if (std::find(used.begin(), used.end(), *resident) == used.end()) used.push_back(*resident);
  }
  for (const auto& resident : used) plan.weight_bytes += resident->bytes();
  plan.buckets = DescribeChoice(table, options.weight_memory, false, tokens, choice);
  for (size_t b = 0; b < tokens.size(); ++b) plan.sparse.push_back(CheapestSparse(table, b));
  return plan;
}

}  // namespace espalier::planner
