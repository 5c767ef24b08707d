#include "engine/planner/model_planner.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/graph/ops/linear.h"
#include "engine/planner/choose.h"
#include "engine/planner/cost_table.h"
#include "engine/planner/digest.h"
#include "engine/planner/linear_pair_choice.h"
#include "engine/planner/measure.h"
#include "engine/planner/plan_cache.h"
#include "engine/sparse/structure.h"
#include "spdlog/spdlog.h"

namespace espalier::planner {
namespace {

// A weight while its layers are planned.
struct WeightWork {
  std::shared_ptr<const Tensor> dense;
  size_t file_bytes = 0;  // in the dtype of the file
  sparse::WeightStructure structure;
  std::string pattern;
  std::optional<WeightCopies> copies;
};

struct LayerWork {
  const graph::LinearOp* op = nullptr;
  std::string node;
  WeightWork* weight = nullptr;
  CostTable table;
  std::string key;
};

class ModelPlanner {
 public:
  ModelPlanner(graph::Program& program, const Device& device, const PrepareOptions& options,
               DType compute)
      : program_(program),
        device_(device),
        options_(options),
        compute_(compute),
        cache_(options.deterministic ? "" : options.plan_cache_dir, device) {
    result_.buckets = BatchBuckets(options.max_batch_size);
    result_.layers.resize(result_.buckets.size());
    result_.weights.resize(program.weights.size());
    result_.plan.device = device.Description();
  }

  absl::StatusOr<PlannedModel> Run() {
    if (absl::Status status = AnalyzeWeights(); !status.ok()) return status;
    if (absl::Status status = ListLayers(); !status.ok()) return status;
    // The budget is for measuring: looking at 4096 x 4096 weights takes 0.2 s each.
    deadline_ = absl::Now() + absl::Milliseconds(options_.measure_budget_millis);
    for (size_t i = 0; i < layers_.size(); ++i) {
      absl::Status status = options_.deterministic ? absl::OkStatus() : MeasureLayer(i);
      if (status.ok()) status = ChooseLayer(layers_[i]);
      if (!status.ok()) {
        return absl::Status(status.code(), absl::StrCat(program_.source, ": node '",
                                                        layers_[i].node, "': ", status.message()));
      }
      ReleaseWeight(i);
    }
    SumBytes();
    LogCacheTrouble();
    result_.plan.source = options_.deterministic ? "deterministic"
                          : measured_            ? "measured"
                          : from_cache_          ? "cache"
                                                 : "cost model";
    return std::move(result_);
  }

 private:
  // What a weight of the file's `dtype` is multiplied as. On the CPU its own type, or f32 (exact) without a kernel for
  // that; on a GPU the type of the activations.
  DType ServedType(DType dtype, const Shape& shape) const {
    if (device_.AsCudaOrNull() != nullptr) return compute_;
    return HasDenseKernel(dtype, shape[0], shape[1], device_) ? dtype : DType::kFloat32;
  }

  absl::Status AnalyzeWeights() {
    weights_.resize(program_.weights.size());
    for (size_t i = 0; i < weights_.size(); ++i) {
      WeightWork& work = weights_[i];
      work.dense = std::move(program_.weights[i].tensor);
      work.file_bytes = work.dense->bytes();
      const DType dtype = work.dense->dtype();
      result_.weights[i].form = {dtype, ServedType(dtype, work.dense->shape()),
                                 options_.flush_subnormals};
      auto served = result_.weights[i].form.Apply(std::move(work.dense));
      if (!served.ok()) return served.status();
      work.dense = *std::move(served);
      auto structure = sparse::AnalyzeStructure(work.dense->view());
      if (!structure.ok()) return structure.status();
      work.structure = *std::move(structure);
      result_.weights[i].nonzeros = work.structure.nonzeros;
      if (!options_.deterministic) work.pattern = PatternDigest(work.dense->view());
      work.copies.emplace(work.dense->view(), device_.AsCudaOrNull());
    }
    return absl::OkStatus();
  }

  absl::Status ListLayers() {
    for (const graph::Step& step : program_.steps) {
      const auto* op = dynamic_cast<const graph::LinearOp*>(step.op.get());
      if (op == nullptr) continue;
      LayerWork layer;
      layer.op = op;
      layer.node = step.node;
      layer.weight = &weights_[op->weight()];
      layer.table = ListOptions(layer.weight->structure, TokensOf(*op, result_.buckets), device_);
      if (!options_.deterministic) {
        layer.key = cache_.KeyOf(layer.weight->pattern);
        auto found = cache_.Load(layer.key, layer.table);
        if (!found.ok()) damaged_.emplace(layer.key, std::string(found.status().message()));
        from_cache_ = (found.ok() && *found) || from_cache_;
      }
      layers_.push_back(std::move(layer));
    }
    return absl::OkStatus();
  }

  // A layer gets its share of the time that is left, by what the cost model says of those to come.
  absl::Status MeasureLayer(size_t index) {
    LayerWork& layer = layers_[index];
    for (size_t i = 0; i < index; ++i) {
      if (layers_[i].key == layer.key && layers_[i].table.tokens == layer.table.tokens) {
        layer.table = layers_[i].table;  // an equal layer was measured already
        return absl::OkStatus();
      }
    }
    const absl::Duration own = PredictMeasuring(layer.table);
    if (own == absl::ZeroDuration()) return absl::OkStatus();
    absl::Duration all;
    for (size_t i = index; i < layers_.size(); ++i) all += PredictMeasuring(layers_[i].table);
    const absl::Time now = absl::Now();
    if (now >= deadline_) return absl::OkStatus();
    auto measured = Measure(layer.table, layer.weight->structure, *layer.weight->copies, device_,
                            now + (deadline_ - now) * absl::FDivDuration(own, all));
    if (!measured.ok()) return measured.status();
    deadline_ += measured->waited;
    if (measured->buckets == 0) return absl::OkStatus();
    measured_ = true;
    stored_.Update(cache_.Store(layer.key, layer.table));
    return absl::OkStatus();
  }

  // A line per model, however many of its layers are concerned.
  void LogCacheTrouble() const {
    if (!damaged_.empty()) {
      spdlog::warn(
          "plan cache: {}: ignoring {} damaged or outdated files, as {}; those layers are measured "
          "again",
          program_.source, damaged_.size(), damaged_.begin()->second);
    }
    if (!stored_.ok()) {
      spdlog::warn("plan cache: {}: {}; the plan is not kept", program_.source,
                   std::string(stored_.message()));
    }
  }

  void SumBytes() {
    ModelPlan& plan = result_.plan;
    plan.weight_bytes = result_.weight_bytes();
    std::set<std::string> names;  // a matrix and its transpose are two weights of one name
    for (size_t i = 0; i < weights_.size(); ++i) {
      if (names.insert(program_.weights[i].name).second) plan.dense_bytes += weights_[i].file_bytes;
    }
  }

  // Frees what layer `index` leaves behind: copies that were not chosen, and with the weight's last
  // layer its dense original.
  void ReleaseWeight(size_t index) {
    WeightWork* weight = layers_[index].weight;
    weight->copies->DropUnused();
    for (size_t i = index + 1; i < layers_.size(); ++i) {
      if (layers_[i].weight == weight) return;
    }
    weight->copies.reset();
    weight->dense.reset();
  }

  absl::Status ChooseLayer(LayerWork& layer) {
    CostTable& table = layer.table;
    const WeightWork& weight = *layer.weight;
    const std::vector<int> choice =
        ChooseOptions(table, options_.weight_memory, options_.deterministic, weight.dense->bytes());
    if (choice.empty()) {
      return absl::UnimplementedError(absl::StrCat(
          "no ", options_.deterministic ? "batch-invariant " : "", "kernel multiplies by a weight ",
          ToString(weight.dense->shape()), " of ", NameOf(weight.dense->dtype())));
    }
    LayerPlan about;
    about.name = layer.node;
    about.weight = program_.weights[layer.op->weight()].name;
    about.out = layer.op->out();
    about.in = layer.op->in();
    about.dense_bytes = weight.file_bytes;
    auto chosen = PackChoice(std::move(about), weight.structure, choice, result_.buckets, options_,
                             table, *layer.weight->copies);
    if (!chosen.ok()) return chosen.status();
    for (size_t b = 0; b < choice.size(); ++b) result_.layers[b].push_back(chosen->buckets[b]);
    auto& all = result_.weights[layer.op->weight()].copies;
    for (auto& resident : chosen->copies) {
      if (std::find(all.begin(), all.end(), resident) == all.end()) all.push_back(resident);
    }
    result_.plan.layers.push_back(std::move(chosen->plan));
    result_.costs.push_back(std::make_shared<const CostTable>(table));
    return absl::OkStatus();
  }

  graph::Program& program_;
  const Device& device_;
  const PrepareOptions& options_;
  const DType compute_;
  const PlanCache cache_;
  PlannedModel result_;
  std::vector<WeightWork> weights_;
  std::vector<LayerWork> layers_;
  absl::Time deadline_;
  bool measured_ = false, from_cache_ = false;
  std::map<std::string, std::string> damaged_;  // cache files by key, and what is wrong with them
  absl::Status stored_;
};

}  // namespace

std::vector<int64_t> BatchBuckets(int64_t max_batch_size) {
  std::vector<int64_t> buckets;
  for (int64_t batch = 1; batch < max_batch_size; batch *= 2) buckets.push_back(batch);
  buckets.push_back(std::max<int64_t>(max_batch_size, 1));
  return buckets;
}

std::vector<int64_t> TokensOf(const graph::LinearOp& linear, const std::vector<int64_t>& buckets) {
  std::vector<int64_t> tokens;
  for (const int64_t batch : buckets) tokens.push_back(batch * linear.tokens_per_item());
  return tokens;
}

absl::StatusOr<ChosenLayer> PackChoice(LayerPlan about, const sparse::WeightStructure& structure,
                                       const std::vector<int>& choice,
                                       const std::vector<int64_t>& buckets,
                                       const PrepareOptions& options, CostTable& table,
                                       WeightCopies& copies) {
  ChosenLayer chosen = {std::move(about), {}, {}};
  LayerPlan& plan = chosen.plan;
  plan.sparsity = structure.sparsity();
  plan.structure = structure.found;
  for (const int option : choice) {
    auto resident = copies.For(table.options[option]);
    if (!resident.ok()) return resident.status();
    table.options[option].resident_bytes = (*resident)->bytes();
    chosen.buckets.push_back({table.options[option].variant, resident->get()});
    if (std::find(chosen.copies.begin(), chosen.copies.end(), *resident) != chosen.copies.end())
      continue;
    plan.weight_bytes += (*resident)->bytes();
    chosen.copies.push_back(*std::move(resident));
  }
  plan.buckets =
      DescribeChoice(table, options.weight_memory, options.deterministic, buckets, choice);
  return chosen;
}

std::vector<std::vector<graph::LinearBinding>> PlannedModel::Bindings() const {
  std::vector<std::vector<graph::LinearBinding>> bindings(layers.size());
  for (size_t b = 0; b < layers.size(); ++b) {
    for (const PlannedLayer& layer : layers[b])
      bindings[b].push_back({layer.variant, layer.weight->view()});
    for (const PlannedPair& pair : pairs) {
      graph::LinearBinding& first = bindings[b][pair.layers.first];
      graph::LinearBinding& second = bindings[b][pair.layers.second];
      first.paired = second.paired = pair.in_bucket[b] && FitsPair(first, second);
    }
  }
  return bindings;
}

size_t PlannedModel::weight_bytes() const {
  size_t bytes = 0;
  for (const PlannedWeight& weight : weights) {
    for (const auto& copy : weight.copies) bytes += copy->bytes();
  }
  return bytes;
}

absl::StatusOr<PlannedModel> PlannedModel::Clone() const {
  PlannedModel clone = *this;
  clone.weights.clear();
  std::map<const ResidentWeight*, ResidentWeight*> clone_of;
  for (const PlannedWeight& weight : weights) {
    PlannedWeight& own = clone.weights.emplace_back(weight);
    own.copies.clear();
    for (const auto& copy : weight.copies) {
      auto cloned = copy->Clone();
      if (!cloned.ok()) return cloned.status();
      clone_of[copy.get()] = cloned->get();
      own.copies.push_back(*std::move(cloned));
    }
  }
  for (auto& bucket : clone.layers) {
    for (PlannedLayer& layer : bucket) layer.weight = clone_of.at(layer.weight);
  }
  return clone;
}

absl::StatusOr<PlannedModel> PlanModel(graph::Program& program, const Device& device,
                                       const PrepareOptions& options, DType compute) {
  return ModelPlanner(program, device, options, compute).Run();
}

}  // namespace espalier::planner
