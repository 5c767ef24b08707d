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
  // Updates of its weights (update_hooks.h).
  int64_t source = 0;  // the version of the repository that its graph is of; 0: itself
  std::shared_ptr<const formats::WeightSource> weights;  // null: the file's
  bool leads = false;      // requests that name no version get it, whatever is above it
  bool activates = false;  // its publication is an activation
};

struct Inspection {
  absl::Status status;    // why no version can be loaded
  bool looked = false;    // into every repository, so that `directory` can be relied on
  std::string directory;  // empty: in no repository
  std::vector<int64_t> available;
  inference::ModelConfig config;
  std::map<int64_t, FoundVersion> selected;  // those to serve
  std::map<int64_t, int64_t> superseded;     // those that are not, and by which
};

// One version of a model whose folder and config were found.
FoundVersion InspectVersion(const LoadRequest& request, const Inspection& found, int64_t number,
                            const std::map<int64_t, VersionContent>& known);

// Looks at the model `name` in `repositories`; blocks as long as the file system does. `known` are
// the contents of what is served: a version whose fingerprint is there is not read again.
Inspection Inspect(ModelLoader& loader, const std::vector<std::string>& repositories,
                   const std::string& name, const LoadRequest& request,
                   const std::map<int64_t, VersionContent>& known);

}  // namespace espalier::runtime
