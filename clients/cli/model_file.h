// model_file.h — finds the model that an offline command is pointed at.
//
//   digits/1/model.onnx   the file itself
//   digits/1              its version directory
//   digits                the model's directory: the highest version, as a server would serve it
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "engine/formats/model_graph.h"
#include "proto/inference/model_config.pb.h"

namespace espalier::cli {

struct ModelFile {
  std::string path;       // of the file
  std::string name;       // of the model: its directory, or the file's stem
  std::string directory;  // where a config.pbtxt may be; empty for a file outside a repository
};

// NotFound, saying what was looked for.
absl::StatusOr<ModelFile> FindModel(const std::string& path);

// The config.pbtxt, if there is one, completed from the model as a server completes it.
absl::StatusOr<inference::ModelConfig> ReadConfig(const ModelFile& file,
                                                  const formats::ModelGraph& graph);

}  // namespace espalier::cli
