#include "clients/cli/model_file.h"

#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/formats/model_config.h"

namespace espalier::cli {
namespace {

namespace fs = std::filesystem;

// The number that a version directory is named after, 0 for another name.
int64_t VersionOf(const fs::path& directory) {
  int64_t version = 0;
  const std::string name = directory.filename().string();
  if (!absl::SimpleAtoi(name, &version) || version <= 0 || name != absl::StrCat(version)) return 0;
  return version;
}

fs::path HighestVersion(const fs::path& directory) {
  fs::path highest;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    if (entry.is_directory(error) && VersionOf(entry.path()) > VersionOf(highest))
      highest = entry.path();
  }
  return highest;
}

std::string FilenameIn(const fs::path& model_directory) {
  auto config = formats::ReadModelConfig(model_directory.string());
  return config.ok() && !config->default_model_filename().empty() ? config->default_model_filename()
                                                                  : formats::kDefaultModelFilename;
}

}  // namespace

absl::StatusOr<ModelFile> FindModel(const std::string& path) {
  std::error_code error;
  fs::path found = fs::path(path).lexically_normal();
  if (!found.has_filename()) found = found.parent_path();  // a trailing slash
  if (!fs::exists(found, error)) return absl::NotFoundError(absl::StrCat(path, " does not exist"));
  if (fs::is_directory(found, error)) {
    const fs::path version = VersionOf(found) > 0 ? found : HighestVersion(found);
    if (version.empty()) {
      return absl::NotFoundError(absl::StrCat(path, " is a directory without versions; expected ",
                                              path, "/1/", formats::kDefaultModelFilename,
                                              ", or give the file itself"));
    }
    found = version / FilenameIn(fs::absolute(version).parent_path());
    if (!fs::exists(found, error))
      return absl::NotFoundError(absl::StrCat(found.string(), " does not exist"));
  }
  const fs::path version = fs::absolute(found).parent_path();
  if (VersionOf(version) == 0) return ModelFile{found.string(), found.stem().string(), ""};
  return ModelFile{found.string(), version.parent_path().filename().string(),
                   version.parent_path().string()};
}

absl::StatusOr<inference::ModelConfig> ReadConfig(const ModelFile& file,
                                                  const formats::ModelGraph& graph) {
  inference::ModelConfig config;
  if (!file.directory.empty()) {
    auto read = formats::ReadModelConfig(file.directory);
    if (!read.ok() && !absl::IsNotFound(read.status())) return read.status();
    if (read.ok()) config = *std::move(read);
  }
  return formats::CompleteModelConfig(std::move(config), file.name, graph);
}

}  // namespace espalier::cli
