// load_levels.h — "1,8,64" or "1:64:x2": the loads that `espalier bench` tries one after the other.
//
//   a,b,c           these
//   a:b             a, a + 1, … up to b
//   a:b:s           a, a + s, … up to b
//   a:b:xf          a, a · f, … up to b
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace espalier::cli {

inline constexpr size_t kMaxLevels = 256;

// WrongUsage, naming the flag, for anything else, numbers outside [least, most] and more than
// kMaxLevels.
absl::StatusOr<std::vector<double>> ParseLevels(absl::string_view flag, absl::string_view text,
                                                double least, double most);

}  // namespace espalier::cli
