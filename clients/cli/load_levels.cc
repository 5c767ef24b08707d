#include "clients/cli/load_levels.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "clients/cli/args.h"

namespace espalier::cli {
namespace {

struct Range {
  double first = 0, last = 0, step = 1;
  bool multiplies = false;
};

bool ParseRange(absl::string_view text, Range& range) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ':');
  if (parts.size() > 3 || !absl::SimpleAtod(parts[0], &range.first)) return false;
  range.last = range.first;
  if (parts.size() > 1 && !absl::SimpleAtod(parts[1], &range.last)) return false;
  if (parts.size() < 3) return true;
  absl::string_view step = parts[2];
  range.multiplies = absl::ConsumePrefix(&step, "x");
  return absl::SimpleAtod(step, &range.step) && range.step > (range.multiplies ? 1 : 0);
}

}  // namespace

absl::StatusOr<std::vector<double>> ParseLevels(absl::string_view flag, absl::string_view text,
                                                double least, double most) {
  std::vector<double> levels;
  for (absl::string_view item : absl::StrSplit(text, ',')) {
    Range range;
    // The negated form also refuses NaN.
    if (!ParseRange(item, range) || !(range.first >= least && range.first <= range.last) ||
        !(range.last <= most)) {
      return WrongUsage(absl::StrCat("--", flag, ": expected numbers from ", least, " to ", most,
                                     " like 1,8,64 or 1:64:x2 or 10:50:10, got '", text, "'"));
    }
    for (double level = range.first; level <= range.last;
         level = range.multiplies ? level * range.step : level + range.step) {
      if (levels.size() == kMaxLevels) {
        return WrongUsage(
            absl::StrCat("--", flag, ": at most ", kMaxLevels, " loads, '", text, "' has more"));
      }
      levels.push_back(level);
    }
  }
  return levels;
}

}  // namespace espalier::cli
