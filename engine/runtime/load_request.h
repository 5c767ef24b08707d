// load_request.h — what a load may ask for beyond "what the repository holds", and what looking
// into the repository found out.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/runtime/model_loader.h"
#include "engine/runtime/version_content.h"

namespace espalier::runtime {

struct LoadRequest {
  std::string config_json;  // in place of config.pbtxt; empty: that
  // In place of the model's folder, by version; only together with config_json (Triton's rule:
  // what the folder's config says need not fit other files).
  std::map<int64_t, std::shared_ptr<const FilesInMemory>> files;
  std::optional<int64_t> version;  // this one alone, whatever the version policy selects

  bool plain() const { return config_json.empty() && files.empty() && !version; }
};

struct FoundVersion {
  VersionContent content;
  absl::Status status;  // why it cannot be loaded
};

struct Inspection {
  absl::Status status;    // why no version can be loaded
  bool looked = false;    // into every repository, so that `directory` can be relied on
  std::string directory;  // empty: in no repository
  std::vector<int64_t> available;
  inference::ModelConfig config;
  std::map<int64_t, FoundVersion> selected;  // those to serve
};

// Looks at the model `name` in `repositories`; blocks as long as the file system does. `known` are
// the contents of what is served: a version whose fingerprint is there is not read again.
Inspection Inspect(ModelLoader& loader, const std::vector<std::string>& repositories,
                   const std::string& name, const LoadRequest& request,
                   const std::map<int64_t, VersionContent>& known);

}  // namespace espalier::runtime
