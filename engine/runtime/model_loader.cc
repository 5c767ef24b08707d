#include "engine/runtime/model_loader.h"

#include "absl/strings/str_cat.h"
#include "engine/formats/model_settings.h"
#include "engine/formats/reader.h"
#include "engine/runtime/log.h"

namespace espalier::runtime {
namespace {

planner::WeightMemory ToPlanner(formats::WeightMemory mode) {
  switch (mode) {
    case formats::WeightMemory::kSmallest:
      return planner::WeightMemory::kSmallest;
    case formats::WeightMemory::kBalanced:
      return planner::WeightMemory::kBalanced;
    case formats::WeightMemory::kFastest:
      return planner::WeightMemory::kFastest;
  }
  return planner::WeightMemory::kBalanced;
}

class FileModelLoader final : public ModelLoader {
 public:
  FileModelLoader(const Device& device, std::string plan_cache_dir)
      : device_(device), plan_cache_dir_(std::move(plan_cache_dir)) {}

  absl::StatusOr<inference::ModelConfig> ReadConfig(const std::string& directory) override {
    auto config = formats::ReadModelConfig(directory);
    if (absl::IsNotFound(config.status())) return inference::ModelConfig();
    return config;
  }

  absl::StatusOr<LoadedModel> Load(LoadJob job) override {
    auto settings = formats::ReadModelSettings(job.config);
    if (!settings.ok()) return settings.status();
    const std::string& filename = job.config.default_model_filename();
    auto graph = formats::ReadModel(
        absl::StrCat(job.directory, "/", job.version, "/",
                     filename.empty() ? formats::kDefaultModelFilename : filename));
    if (!graph.ok()) return graph.status();
    std::vector<std::string> warnings;
    auto config = formats::CompleteModelConfig(std::move(job.config), job.model, *graph, &warnings);
    if (!config.ok()) return config.status();
    for (const std::string& warning : warnings) {
      LogEvent(spdlog::level::warn, "config setting without effect",
               {{"model", job.model}, {"version", job.version}, {"setting", warning}});
    }
    planner::PrepareOptions options;
    options.max_batch_size = config->max_batch_size();
    options.weight_memory = ToPlanner(settings->weight_memory);
    options.deterministic = settings->deterministic;
    options.flush_subnormals = settings->flush_subnormals;
    options.plan_cache_dir = plan_cache_dir_;
    options.measure_budget_millis = job.measure_budget_millis;
    auto model = planner::PreparedModel::Prepare(*std::move(graph), device_, options);
    if (!model.ok()) return model.status();
    return LoadedModel{*std::move(config), *std::move(model)};
  }

 private:
  const Device& device_;
  const std::string plan_cache_dir_;
};

}  // namespace

std::unique_ptr<ModelLoader> MakeFileModelLoader(const Device& device, std::string plan_cache_dir) {
  return std::make_unique<FileModelLoader>(device, std::move(plan_cache_dir));
}

}  // namespace espalier::runtime
