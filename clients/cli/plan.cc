#include <algorithm>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "clients/cli/command.h"
#include "clients/cli/device_flags.h"
#include "clients/cli/model_file.h"
#include "engine/formats/model_settings.h"
#include "engine/formats/reader.h"
#include "engine/planner/prepared_model.h"

namespace espalier::cli {
namespace {

using planner::BucketChoice;
using planner::ModelPlan;

constexpr int64_t kMaxBatch = 1 << 16;
constexpr int64_t kMaxMeasureSeconds = 3600;

// The settings of the model's config.pbtxt, overridden by flags.
absl::StatusOr<planner::PrepareOptions> OptionsFrom(const Args& args, inference::ModelConfig config,
                                                    const std::vector<int64_t>& batches) {
  auto& parameters = *config.mutable_parameters();
  if (args.Has("weight_memory")) {
    parameters["weight_memory"].set_string_value(args.String("weight_memory", ""));
  }
  for (const char* flag : {"deterministic", "flush_subnormals"}) {
    if (args.Has(flag)) parameters[flag].set_string_value("true");
  }
  absl::StatusOr<formats::ModelSettings> settings = formats::ReadModelSettings(config);
  if (!settings.ok()) return settings.status();
  absl::StatusOr<int64_t> seconds = args.Int("measure_seconds", 10, 0, kMaxMeasureSeconds);
  if (!seconds.ok()) return seconds.status();
  planner::PrepareOptions options;
  options.max_batch_size = config.max_batch_size();
  // A model without a batch dimension (0) stays one.
  if (!batches.empty() && options.max_batch_size > 0) {
    options.max_batch_size = *std::max_element(batches.begin(), batches.end());
  }
  options.weight_memory = settings->weight_memory;
  options.deterministic = settings->deterministic;
  options.flush_subnormals = settings->flush_subnormals;
  options.precision = settings->precision;
  options.measure_budget_millis = *seconds * 1000;
  return options;
}

// Leaves the buckets that serve `batches`; all of them when it is empty.
void KeepBuckets(const std::vector<int64_t>& batches, ModelPlan& plan) {
  if (batches.empty()) return;
  for (planner::LayerPlan& layer : plan.layers) {
    std::vector<BucketChoice> kept;
    int64_t previous = 0;
    for (const BucketChoice& bucket : layer.buckets) {
      const auto serves = [&](int64_t batch) { return batch > previous && batch <= bucket.batch; };
      if (std::any_of(batches.begin(), batches.end(), serves)) kept.push_back(bucket);
      previous = bucket.batch;
    }
    layer.buckets = std::move(kept);
  }
}

absl::Status Run(const Args& args) {
  absl::StatusOr<std::vector<int64_t>> batches = args.IntList("batch", 1, kMaxBatch);
  if (!batches.ok()) return batches.status();
  absl::StatusOr<ModelFile> file = FindModel(args.positional()[0]);
  if (!file.ok()) return file.status();
  absl::StatusOr<formats::ModelGraph> graph = formats::ReadModel(file->path);
  if (!graph.ok()) return graph.status();
  absl::StatusOr<inference::ModelConfig> config = ReadConfig(*file, *graph);
  if (!config.ok()) return config.status();
  absl::StatusOr<planner::PrepareOptions> options = OptionsFrom(args, *std::move(config), *batches);
  if (!options.ok()) return options.status();
  absl::StatusOr<Devices> devices = OpenDevices(args);
  if (!devices.ok()) return devices.status();
  auto model =
      planner::PreparedModel::Prepare(*std::move(graph), MeasuringDevice(*devices), *options);
  if (!model.ok()) return model.status();
  ModelPlan plan = (*model)->plan();
  KeepBuckets(*batches, plan);
  std::cout << (args.Has("json") ? planner::ToJson(plan) + "\n" : planner::ToTable(plan));
  return absl::OkStatus();
}

}  // namespace

Command PlanCommand() {
  return {
      {.name = "plan",
       .summary = "which layout and kernel every layer of a model file gets here, and why",
       .arguments = "MODEL",
       .min_positional = 1,
       .max_positional = 1,
       .flags = WithDeviceFlags({
           {"batch", "1,8,64",
            "Batch sizes to show. Default: all buckets up to the model's max_batch_size."},
           {"weight_memory", "MODE",
            "smallest, balanced or fastest: whether a layer may keep a second layout. Default: "
            "as\n"
            "config.pbtxt says, else balanced."},
           {"deterministic", "",
            "One kernel a layer for all batch sizes, chosen without measuring."},
           {"flush_subnormals", "", "Values below the smallest normal number count as zero."},
           {"measure_seconds", "N",
            "Time for measuring; the cost model decides the rest. Default: 10. 0: no "
            "measuring."},
           {"json", "", "Print JSON instead of a table."},
       }),
       .details =
           R"(MODEL is an .onnx file, a version directory or a model's directory. No server is needed, but the
kernels are measured on this machine: plan where the model will be served, with nothing else running.

Examples:
  espalier plan tests/data/models/mnist_diagonal16 --batch 1,8,64
  espalier plan model.onnx --weight_memory smallest --threads 1 --json)"},
      &Run};
}

}  // namespace espalier::cli
