// model_loader.h — from files to a prepared model; the seam where tests put a loader of their own.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/formats/model_config.h"
#include "engine/formats/reader.h"
#include "engine/formats/weight_source.h"
#include "engine/planner/prepared_model.h"
#include "engine/runtime/labels.h"
#include "engine/tensor/devices.h"

namespace espalier::runtime {

struct LoadJob {
  std::string model;
  std::string directory;  // of the model
  int64_t version = 0;
  inference::ModelConfig config;  // as read from config.pbtxt; empty when there is none
  std::shared_ptr<const formats::FilesInMemory> files;  // in place of the version's folder, or null
  int64_t measure_budget_millis = 0;
  std::shared_ptr<const formats::WeightSource> weights;  // in place of the file's own, or null
};

struct LoadedModel {
  inference::ModelConfig config;  // complete
  std::unique_ptr<planner::PreparedModel> model;
  Labels labels;
};

// Thread-safe: several loads run at once, each on a loader thread, where blocking is fine.
class ModelLoader {
 public:
  virtual ~ModelLoader() = default;
  // The config of the model in `directory`, empty when there is none; InvalidArgument when it
  // cannot be read.
  virtual absl::StatusOr<inference::ModelConfig> ReadConfig(const std::string& directory) = 0;
  // Errors name the file, the node or tensor, expected and got.
  virtual absl::StatusOr<LoadedModel> Load(LoadJob job) = 0;
};

// Reads `<directory>/<version>/<default_model_filename or model.onnx>` and prepares it where its
// config wants it (placement.h). A model that a GPU has no kernel for runs on the CPU, with a line in
// the log, unless its config demands a GPU or a precision that only a GPU has. The devices outlive
// the loader and its models; the CPU's workers are started here, as many as any model's
// instances may use, see thread_priority.h.
// `plan_cache_dir` may be empty.
std::unique_ptr<ModelLoader> MakeFileModelLoader(const Devices& devices,
                                                 std::string plan_cache_dir);

}  // namespace espalier::runtime
