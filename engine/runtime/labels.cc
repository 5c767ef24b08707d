#include "engine/runtime/labels.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "engine/formats/names.h"
#include "engine/formats/regular_file.h"

namespace espalier::runtime {
namespace {

absl::StatusOr<std::vector<std::string>> ReadFile(const std::string& directory,
                                                  const std::string& name) {
  auto file = formats::RegularFile::OpenBeneath(directory, name);
  if (!file.ok()) return file.status();
  auto content = file->ReadAll(kMaxLabelFileBytes);
  if (!content.ok()) return content.status();
  auto labels = ParseLabels(
      absl::string_view(reinterpret_cast<const char*>(content->data()), content->size()));
  if (labels.ok()) return labels;
  return absl::Status(labels.status().code(),
                      absl::StrCat(file->path(), ": ", labels.status().message()));
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ParseLabels(absl::string_view text) {
  if (!formats::IsUtf8(text)) return absl::InvalidArgumentError("labels are not UTF-8");
  const size_t lines = static_cast<size_t>(std::count(text.begin(), text.end(), '\n')) + 1;
  if (lines > kMaxLabels) {
    return absl::ResourceExhaustedError(
        absl::StrCat("labels have ", lines, " lines, expected at most ", kMaxLabels));
  }
  std::vector<std::string> labels;
  labels.reserve(lines);
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    absl::ConsumeSuffix(&line, "\r");
    labels.emplace_back(line);
  }
  // What follows the last line's end is no line.
  if (labels.back().empty()) labels.pop_back();
  return labels;
}

absl::StatusOr<Labels> ReadLabels(const std::string& model_directory,
                                  const inference::ModelConfig& config) {
  Labels all;
  for (const auto& output : config.output()) {
    if (output.label_filename().empty()) continue;
    auto labels = ReadFile(model_directory, output.label_filename());
    if (!labels.ok()) {
      return absl::Status(
          labels.status().code(),
          absl::StrCat("label_filename ", formats::Quoted(output.label_filename()), " of output ",
                       formats::Quoted(output.name()), ": ", labels.status().message()));
    }
    all.emplace(output.name(), *std::move(labels));
  }
  return all;
}

}  // namespace espalier::runtime
