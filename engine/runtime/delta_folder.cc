#include "engine/runtime/delta_folder.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/formats/regular_file.h"
#include "engine/updates/byte_source.h"
#include "engine/updates/delta_file.h"

namespace espalier::runtime {
namespace {

constexpr size_t kMaxFiles = 100'000;
constexpr size_t kPieceBytes = 1 << 20;

}  // namespace

DeltaFolder::File DeltaFolder::Read(const std::string& folder, const std::string& name) {
  File file{.name = name, .path = absl::StrCat(folder, "/", name)};
  auto opened = formats::RegularFile::Open(file.path);
  if (!opened.ok()) {
    file.status = opened.status();
    return file;
  }
  const auto source = std::make_shared<updates::FileSource>(*std::move(opened));
  file.bytes = source->size();
  updates::Sha256 sha;
  std::string piece;
  for (uint64_t at = 0; at < file.bytes && file.status.ok(); at += piece.size()) {
    piece.resize(static_cast<size_t>(std::min<uint64_t>(kPieceBytes, file.bytes - at)));
    file.status = source->ReadAt(at, piece.data(), piece.size());
    sha.Update(piece.data(), piece.size());
  }
  if (!file.status.ok()) return file;
  file.digest = sha.Finish();
  const auto delta = updates::DeltaFile::Open(source);
  file.status = delta.status();
  if (!delta.ok()) return file;
  file.sequence = delta->manifest().sequence;
  file.target = delta->manifest().target_version;
  file.target_weights = delta->manifest().target_weights;
  return file;
}

absl::StatusOr<std::vector<DeltaFolder::File>> DeltaFolder::Look(const std::string& folder,
                                                                 int64_t state) {
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator(folder, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename();
    struct stat info;
    if (name[0] == '.' || !absl::EndsWith(name, ".espd")) continue;
    if (stat(entry->path().c_str(), &info) != 0 || !S_ISREG(info.st_mode)) continue;
    if (seen_.size() >= kMaxFiles && !seen_.contains(name)) {
      return absl::ResourceExhaustedError(
          absl::StrCat(folder, " has more than ", kMaxFiles, " deltas"));
    }
    std::string identity = absl::StrCat(info.st_size, " ", info.st_mtim.tv_sec, ".",
                                        info.st_mtim.tv_nsec, " ", info.st_ino);
    Seen& seen = seen_[name];
    seen.there = true;
    if (seen.identity != identity) {
      seen = {.identity = std::move(identity), .there = true};
    } else if (!seen.still) {
      seen.still = true;
      seen.file = Read(folder, name);
    }
  }
  if (error && error != std::errc::no_such_file_or_directory)
    return absl::UnavailableError(absl::StrCat(folder, ": ", error.message()));
  std::vector<File> files;
  for (auto place = seen_.begin(); place != seen_.end();) {
    Seen& seen = place->second;
    if (!std::exchange(seen.there, false)) {
      place = seen_.erase(place);
      continue;
    }
    if (seen.still && !seen.settled && seen.waits != state) files.push_back(seen.file);
    ++place;
  }
  std::stable_sort(files.begin(), files.end(),
                   [](const File& a, const File& b) { return a.sequence < b.sequence; });
  return files;
}

void DeltaFolder::Settle(const std::string& name) {
  if (const auto place = seen_.find(name); place != seen_.end()) place->second.settled = true;
}

void DeltaFolder::Wait(const std::string& name, int64_t state) {
  if (const auto place = seen_.find(name); place != seen_.end()) place->second.waits = state;
}

bool DeltaFolder::Note(const std::string& name) {
  const auto place = seen_.find(name);
  return place != seen_.end() && !std::exchange(place->second.noted, true);
}

}  // namespace espalier::runtime
