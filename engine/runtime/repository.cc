#include "engine/runtime/repository.h"

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/formats/regular_file.h"
#include "engine/runtime/infer_request.h"
#include "engine/runtime/log.h"

namespace espalier::runtime {
namespace {

namespace fs = std::filesystem;

absl::Status ListingError(const std::string& directory, const std::error_code& error) {
  const std::string message = absl::StrCat("cannot list ", directory, ": ", error.message());
  if (error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory) {
    return absl::NotFoundError(message);
  }
  return absl::PermissionDeniedError(message);
}

// Whether it was not said before: repositories are listed again and again.
bool IsNews(const std::string& path) {
  constexpr size_t kRemembered = 1024;
  static std::mutex mutex;
  static auto& said = *new std::set<std::string>;
  const std::lock_guard lock(mutex);
  if (said.size() >= kRemembered) said.clear();
  return said.insert(path).second;
}

// Names of the directories (or links to some) in `directory`, sorted.
absl::StatusOr<std::vector<std::string>> ListDirectories(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entry(directory, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    std::error_code unreadable;
    if (entry->is_directory(unreadable)) {
      names.push_back(entry->path().filename().string());
    } else if (unreadable && unreadable != std::errc::no_such_file_or_directory &&
               IsNews(entry->path().string())) {
      LogEvent(spdlog::level::warn, "directory entry skipped",
               {{"path", Printable(entry->path().string())}, {"reason", unreadable.message()}});
    }
  }
  if (error) return ListingError(directory, error);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

bool IsModelName(absl::string_view name) {
  const auto allowed = [](char c) {
    return c >= 0x20 && c < 0x7f && c != '/' && c != '\\' && c != '"';
  };
  return !name.empty() && name.size() <= 255 && name[0] != '.' &&
         std::all_of(name.begin(), name.end(), allowed);
}

bool IsFilePath(absl::string_view path) {
  return formats::IsPathBeneath(path) && path[0] != '.' && !absl::StrContains(path, "/.");
}

std::optional<int64_t> ParseVersion(absl::string_view text) {
  int64_t version = 0;
  if (text.empty() || text[0] < '1' || text[0] > '9') return std::nullopt;
  if (!std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; }))
    return std::nullopt;
  if (!absl::SimpleAtoi(text, &version)) return std::nullopt;
  return version;
}

absl::StatusOr<std::vector<RepositoryModel>> ScanRepository(const std::string& repository) {
  auto names = ListDirectories(repository);
  if (!names.ok()) return names.status();
  std::vector<RepositoryModel> models;
  for (const std::string& name : *names) {
    if (name[0] == '.') continue;
    if (!IsModelName(name)) {
      if (IsNews(absl::StrCat(repository, "/", name))) {
        LogEvent(spdlog::level::warn, "directory skipped: not a model name",
                 {{"directory", Printable(name)}, {"repository", repository}});
      }
      continue;
    }
    RepositoryModel model{name, absl::StrCat(repository, "/", name), {}};
    auto versions = ListVersions(model.directory);
    if (versions.ok()) model.versions = *std::move(versions);  // else its load will say why
    models.push_back(std::move(model));
  }
  return models;
}

absl::StatusOr<std::vector<int64_t>> ListVersions(const std::string& model_directory) {
  auto names = ListDirectories(model_directory);
  if (!names.ok()) return names.status();
  std::vector<int64_t> versions;
  for (const std::string& name : *names) {
    if (const auto version = ParseVersion(name)) versions.push_back(*version);
  }
  std::sort(versions.begin(), versions.end());
  return versions;
}

std::vector<int64_t> SelectVersions(const inference::ModelVersionPolicy& policy,
                                    const std::vector<int64_t>& available) {
  if (policy.has_all()) return available;
  if (policy.has_specific()) {
    const std::set<int64_t> wanted(policy.specific().versions().begin(),
                                   policy.specific().versions().end());
    return {wanted.begin(), wanted.end()};
  }
  const size_t latest = policy.has_latest() ? std::max(policy.latest().num_versions(), 1u) : 1;
  return {available.end() - static_cast<ptrdiff_t>(std::min(latest, available.size())),
          available.end()};
}

}  // namespace espalier::runtime
