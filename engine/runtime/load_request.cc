#include "engine/runtime/load_request.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "engine/runtime/repository.h"

namespace espalier::runtime {
namespace {

using absl::StrCat;

// The model's folder; empty when no repository has it. An error when a repository cannot be asked:
// "not there" and "cannot tell" must not be confused.
absl::StatusOr<std::string> FindDirectory(const std::vector<std::string>& repositories,
                                          const std::string& name) {
  std::string found;
  for (const std::string& repository : repositories) {
    const std::string directory = StrCat(repository, "/", name);
    struct stat info;
    if (stat(directory.c_str(), &info) != 0) {
      const int error = errno;
      if ((error == ENOENT || error == ENOTDIR) && stat(repository.c_str(), &info) == 0) continue;
      return absl::UnavailableError(
          StrCat("cannot look into ", repository, ": ", absl::ErrnoToStatus(error, "").message()));
    }
    if (!S_ISDIR(info.st_mode)) continue;
    if (!found.empty()) {
      return absl::InvalidArgumentError(
          StrCat("the model is in two repositories: ", found, " and ", directory));
    }
    found = directory;
  }
  return found;
}

absl::Status ListAvailable(const LoadRequest& request, const std::string& name,
                           Inspection& result) {
  if (!request.files.empty()) {
    for (const auto& [number, files] : request.files) result.available.push_back(number);
    return absl::OkStatus();
  }
  if (result.directory.empty())
    return absl::NotFoundError(StrCat("no repository has a model '", name, "'"));
  auto versions = ListVersions(result.directory);
  if (!versions.ok()) return versions.status();
  result.available = *std::move(versions);
  if (!result.available.empty()) return absl::OkStatus();
  return absl::NotFoundError(StrCat("no version in ", result.directory,
                                    "; expected a directory like ", result.directory, "/1"));
}

absl::Status ReadConfig(ModelLoader& loader, const LoadRequest& request, Inspection& result) {
  if (request.config_json.empty() && !request.files.empty()) {
    return absl::InvalidArgumentError(
        "files were given without a config: expected the parameter 'config' beside them, because "
        "the repository's config need not fit other files");
  }
  auto config = request.config_json.empty()
                    ? loader.ReadConfig(result.directory)
                    : formats::ParseModelConfigJson(request.config_json, "parameter 'config'");
  if (!config.ok()) return config.status();
  result.config = *std::move(config);
  return absl::OkStatus();
}

}  // namespace

FoundVersion InspectVersion(const LoadRequest& request, const Inspection& found, int64_t number,
                            const std::map<int64_t, VersionContent>& known) {
  FoundVersion version;
  if (!std::binary_search(found.available.begin(), found.available.end(), number)) {
    version.status = absl::NotFoundError(StrCat(
        request.version ? "asked for" : "selected by the model's version_policy",
        ", but there is no ",
        request.files.empty() ? StrCat("directory ", found.directory, "/", number) : "file of it"));
    return version;
  }
  if (const auto files = request.files.find(number); files != request.files.end()) {
    version.content = ContentOf(*files->second, found.config);
    return version;
  }
  auto fingerprint = FingerprintOf(found.directory, number, found.config);
  if (!fingerprint.ok()) {
    version.status = fingerprint.status();
    return version;
  }
  version.content.fingerprint = *std::move(fingerprint);
  if (const auto same = known.find(number);
      same != known.end() && same->second.fingerprint == version.content.fingerprint) {
    version.content = same->second;
    return version;
  }
  auto digest = DigestOf(found.directory, number, found.config);
  if (digest.ok()) {
    version.content.digest = *std::move(digest);
  } else {
    version.status = digest.status();
  }
  return version;
}

Inspection Inspect(ModelLoader& loader, const std::vector<std::string>& repositories,
                   const std::string& name, const LoadRequest& request,
                   const std::map<int64_t, VersionContent>& known) {
  Inspection result;
  auto directory = FindDirectory(repositories, name);
  if (!directory.ok()) {
    result.status = directory.status();
    return result;
  }
  result.looked = true;
  result.directory = *std::move(directory);
  result.status = ListAvailable(request, name, result);
  if (result.status.ok()) result.status = ReadConfig(loader, request, result);
  if (!result.status.ok()) return result;
  const std::vector<int64_t> selected =
      request.version ? std::vector<int64_t>{*request.version}
                      : SelectVersions(result.config.version_policy(), result.available);
  for (const int64_t number : selected)
    result.selected[number] = InspectVersion(request, result, number, known);
  return result;
}

}  // namespace espalier::runtime
