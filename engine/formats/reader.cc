#include "engine/formats/reader.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/formats/names.h"
#include "engine/formats/onnx_reader.h"
#include "engine/formats/regular_file.h"

namespace espalier::formats {
namespace {

struct Format {
  const char* name;
  bool (*matches)(
      absl::string_view head);  // the first kHeadBytes of the file, or all of a shorter one
  absl::StatusOr<ModelGraph> (*read)(const RegularFile& file, const ReadLimits& limits);
  absl::StatusOr<ModelGraph> (*read_memory)(absl::string_view bytes, const std::string& source,
                                            const FilesInMemory& files, const ReadLimits& limits);
};

constexpr Format kFormats[] = {
    {"ONNX", LooksLikeOnnx, ReadOnnx, ReadOnnxInMemory},
};

constexpr int64_t kHeadBytes = 64;

absl::Status UnknownFormat(const std::string& path, absl::string_view head) {
  std::vector<const char*> names;
  for (const Format& format : kFormats) names.push_back(format.name);
  return absl::InvalidArgumentError(absl::StrCat(
      path, ": expected a model in one of the formats ", absl::StrJoin(names, ", "), ", got ",
      head.empty() ? "an empty file" : "a file that starts with " + Quoted(head.substr(0, 16))));
}

}  // namespace

absl::StatusOr<ModelGraph> ReadModel(const std::string& path, const ReadLimits& limits) {
  const auto file = RegularFile::Open(path);
  if (!file.ok()) return file.status();
  std::string head(static_cast<size_t>(std::min(file->size(), kHeadBytes)), '\0');
  if (auto status = file->ReadAt(0, head.data(), static_cast<int64_t>(head.size())); !status.ok())
    return status;
  for (const Format& format : kFormats) {
    if (format.matches(head)) return format.read(*file, limits);
  }
  return UnknownFormat(path, head);
}

absl::StatusOr<ModelGraph> ReadModelInMemory(const FilesInMemory& files, const std::string& name,
                                             const std::string& origin, const ReadLimits& limits) {
  const std::string path = absl::StrCat(origin, "/", name);
  const auto found = files.find(name);
  if (found == files.end())
    return absl::NotFoundError(absl::StrCat("no ", Quoted(name), " in the ", origin));
  const absl::string_view head = absl::string_view(found->second).substr(0, kHeadBytes);
  for (const Format& format : kFormats) {
    if (format.matches(head)) return format.read_memory(found->second, path, files, limits);
  }
  return UnknownFormat(path, head);
}

}  // namespace espalier::formats
