// repository.h — a model repository on disk, in Triton's layout; only ever read.
//
//   <repository>/<model>/config.pbtxt            optional
//   <repository>/<model>/<version>/model.onnx    or the config's default_model_filename
//
// A version is a directory whose name is a decimal integer above zero without leading zeros; others
// are ignored, as are files and hidden directories beside the models.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/formats/model_config.h"

namespace espalier::runtime {

struct RepositoryModel {
  std::string name;
  std::string directory;
  std::vector<int64_t> versions;  // ascending
};

// A name that may stand in messages, metrics and paths: 1 to 255 printable ASCII characters without
// '/', '\' and '"', no leading dot.
bool IsModelName(absl::string_view name);

// A relative path without "..", empty and hidden components.
bool IsFilePath(absl::string_view path);

// "7" → 7; nullopt for "", "07", "0", "-1", "1.0", "x" and what does not fit an int64.
std::optional<int64_t> ParseVersion(absl::string_view text);

// The models in `repository`, by name. NotFound or PermissionDenied when the directory cannot be
// listed. Directories whose name is no model name are skipped with a warning.
absl::StatusOr<std::vector<RepositoryModel>> ScanRepository(const std::string& repository);

// The version directories of a model, ascending.
absl::StatusOr<std::vector<int64_t>> ListVersions(const std::string& model_directory);

// The versions that `policy` selects among `available` (ascending); by default the latest one.
// `specific` keeps versions that are not available, so that the loader can say so.
std::vector<int64_t> SelectVersions(const inference::ModelVersionPolicy& policy,
                                    const std::vector<int64_t>& available);

}  // namespace espalier::runtime
