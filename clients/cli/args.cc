#include "clients/cli/args.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace espalier::cli {
namespace {

constexpr size_t kMaxListed = 4096;

constexpr absl::string_view kWrongUsage = "espalier.cli/wrong_usage";

absl::Status UsageError(const CommandSpec& spec, absl::string_view problem) {
  return WrongUsage(absl::StrCat(problem, " (espalier ", spec.name, " --help explains)"));
}

std::string Usage(const CommandSpec& spec) {
  return absl::StrCat("espalier ", spec.name, spec.arguments.empty() ? "" : " ", spec.arguments,
                      spec.flags.empty() ? "" : " [flags]");
}

// Levenshtein distance, one row at a time.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replace = diagonal + (a[i] != b[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replace, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

template <typename T>
absl::StatusOr<T> ParseNumber(absl::string_view flag, absl::string_view text, T least, T most) {
  T value{};
  bool parsed = false;
  if constexpr (std::is_same_v<T, double>) {
    parsed = absl::SimpleAtod(text, &value);
  } else {
    parsed = absl::SimpleAtoi(text, &value);
  }
  // The negated form also refuses NaN.
  if (!parsed || !(value >= least && value <= most)) {
    return WrongUsage(absl::StrCat("--", flag, ": expected a number from ", least, " to ", most,
                                   ", got '", text, "'"));
  }
  return value;
}

}  // namespace

absl::Status WrongUsage(absl::string_view message) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kWrongUsage, absl::Cord());
  return status;
}

bool IsWrongUsage(const absl::Status& status) { return status.GetPayload(kWrongUsage).has_value(); }

std::string HelpText(const CommandSpec& spec) {
  std::string text =
      absl::StrCat("espalier ", spec.name, " — ", spec.summary, "\n\nUsage: ", Usage(spec), "\n");
  if (!spec.flags.empty()) text.append("\nFlags:\n");
  for (const FlagSpec& flag : spec.flags) {
    const std::string letter =
        flag.letter == '\0' ? "" : absl::StrCat("-", std::string(1, flag.letter), ", ");
    absl::StrAppend(&text, "  ", letter, "--", flag.name, flag.value.empty() ? "" : " ", flag.value,
                    "\n      ", absl::StrReplaceAll(flag.help, {{"\n", "\n      "}}),
                    flag.repeated ? " May be given several times." : "", "\n");
  }
  if (!spec.details.empty()) absl::StrAppend(&text, "\n", spec.details, "\n");
  return text;
}

std::string Nearest(absl::string_view typed, absl::Span<const std::string> known) {
  std::string best;
  size_t best_distance = 3;
  for (const std::string& name : known) {
    const size_t distance = EditDistance(typed.substr(0, 64), name);
    if (distance < best_distance) {
      best = name;
      best_distance = distance;
    }
  }
  return best;
}

absl::StatusOr<Args> Args::Parse(const CommandSpec& spec, absl::Span<const char* const> arguments) {
  Args args;
  bool flags_ended = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const absl::string_view argument = arguments[i];
    if (!flags_ended && argument == "--") {
      flags_ended = true;
    } else if (!flags_ended && absl::StartsWith(argument, "-") && argument != "-") {
      if (absl::Status status = args.ParseFlag(spec, arguments, i); !status.ok()) return status;
    } else {
      args.positional_.emplace_back(argument);
    }
  }
  if (args.positional_.size() < spec.min_positional) {
    return UsageError(
        spec,
        absl::StrCat("expected ", spec.arguments, ", got ",
                     args.positional_.empty() ? "nothing" : absl::StrJoin(args.positional_, " ")));
  }
  if (args.positional_.size() > spec.max_positional) {
    return UsageError(
        spec, absl::StrCat("unexpected argument '", args.positional_[spec.max_positional], "'"));
  }
  return args;
}

absl::Status Args::ParseFlag(const CommandSpec& spec, absl::Span<const char* const> arguments,
                             size_t& index) {
  const absl::string_view argument = arguments[index];
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(argument, absl::MaxSplits('=', 1));
  const bool has_value = absl::StrContains(argument, '=');
  const bool is_long = absl::StartsWith(argument, "--");
  std::string name = absl::StrReplaceAll(parts.first.substr(is_long ? 2 : 1), {{"-", "_"}});
  const auto flag = std::find_if(spec.flags.begin(), spec.flags.end(), [&](const FlagSpec& known) {
    return is_long ? known.name == name
                   : known.letter != '\0' && name == std::string(1, known.letter);
  });
  if (flag == spec.flags.end()) {
    std::vector<std::string> names;
    for (const FlagSpec& known : spec.flags) names.push_back(known.name);
    const std::string nearest = Nearest(name, names);
    return UsageError(
        spec, absl::StrCat("unknown flag ", parts.first,
                           nearest.empty() ? "" : absl::StrCat("; did you mean --", nearest, "?")));
  }
  name = flag->name;
  std::vector<std::string>& values = values_[name];
  if (!values.empty() && !flag->repeated)
    return UsageError(spec, absl::StrCat("--", name, " is given twice"));
  if (flag->value.empty()) {
    if (has_value)
      return UsageError(spec,
                        absl::StrCat("--", name, " takes no value, got '", parts.second, "'"));
    values.push_back("");
    return absl::OkStatus();
  }
  if (!has_value && index + 1 == arguments.size()) {
    return UsageError(spec, absl::StrCat("--", name, " needs a value: --", name, " ", flag->value));
  }
  values.emplace_back(has_value ? parts.second : absl::string_view(arguments[++index]));
  return absl::OkStatus();
}

bool Args::Has(absl::string_view flag) const { return values_.find(flag) != values_.end(); }

std::string Args::String(absl::string_view flag, absl::string_view fallback) const {
  const auto found = values_.find(flag);
  return found == values_.end() ? std::string(fallback) : found->second.front();
}

std::vector<std::string> Args::All(absl::string_view flag) const {
  const auto found = values_.find(flag);
  return found == values_.end() ? std::vector<std::string>() : found->second;
}

absl::StatusOr<int64_t> Args::Int(absl::string_view flag, int64_t fallback, int64_t least,
                                  int64_t most) const {
  return Has(flag) ? ParseNumber<int64_t>(flag, String(flag, ""), least, most) : fallback;
}

absl::StatusOr<double> Args::Double(absl::string_view flag, double fallback, double least,
                                    double most) const {
  return Has(flag) ? ParseNumber<double>(flag, String(flag, ""), least, most) : fallback;
}

absl::StatusOr<std::vector<int64_t>> Args::IntList(absl::string_view flag, int64_t least,
                                                   int64_t most) const {
  std::vector<int64_t> numbers;
  if (!Has(flag)) return numbers;
  const std::string text = String(flag, "");
  for (absl::string_view item : absl::StrSplit(text, ',')) {
    absl::StatusOr<int64_t> number = ParseNumber<int64_t>(flag, item, least, most);
    if (!number.ok()) return number.status();
    if (numbers.size() == kMaxListed) {
      return WrongUsage(absl::StrCat("--", flag, ": at most ", kMaxListed, " numbers"));
    }
    numbers.push_back(*number);
  }
  return numbers;
}

}  // namespace espalier::cli
