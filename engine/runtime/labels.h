// labels.h — names of the classes of an output, from the config's label_filename: one a line, line
// i names class i.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/formats/model_config.h"

namespace espalier::runtime {

// Enough for the words of a language model; labels travel in responses.
inline constexpr int64_t kMaxLabelFileBytes = int64_t{16} << 20;
inline constexpr size_t kMaxLabels = size_t{1} << 20;

// By the output's name; empty for a model without labels.
using Labels = absl::flat_hash_map<std::string, std::vector<std::string>>;

// Reads the label files that `config` names, which lie below the model's folder. Errors name the
// file: NotFound, InvalidArgument (not UTF-8, a way out of the folder), ResourceExhausted above the
// limits.
absl::StatusOr<Labels> ReadLabels(const std::string& model_directory,
                                  const inference::ModelConfig& config);

// The lines of a label file. A carriage return before a line's end belongs to the end.
absl::StatusOr<std::vector<std::string>> ParseLabels(absl::string_view text);

}  // namespace espalier::runtime
