// args.h — the command line of one subcommand: declared as data, parsed strictly, explained by
// --help.
//
//   const CommandSpec kSpec = {.name = "plan", .arguments = "MODEL", .flags = {{"batch", "1,8,64",
//   "…"}}, …}; absl::StatusOr<Args> args = Args::Parse(kSpec, {argv + 2, argv + argc});
//   absl::StatusOr<int64_t> threads = args->Int("threads", 0, 0, 1024);
//
// Syntax   --name value and --name=value, -x value where a flag has a letter; --switch takes none; dashes and underscores in names are
//          the same; "--" ends the flags; everything else is a positional argument.
// Errors   WrongUsage, naming the flag, the value and what would do: unknown or repeated flags,
//          missing or surplus values and positionals, values out of range.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace espalier::cli {

struct FlagSpec {
  std::string name;   // with underscores
  std::string value;  // placeholder in --help; empty for a switch
  std::string help;
  bool repeated = false;
  char letter = '\0';  // "-o", if it has one
};

struct CommandSpec {
  std::string name;
  std::string summary;    // one line, for the list of commands
  std::string arguments;  // "MODEL..." as --help shows it; empty for none
  size_t min_positional = 0;
  size_t max_positional = 0;
  std::vector<FlagSpec> flags;
  std::string details;  // below the flags in --help: what it prints, examples
};

// A mistake in the command line (exit code 2), told apart from an InvalidArgument of a server or
// file.
absl::Status WrongUsage(absl::string_view message);
bool IsWrongUsage(const absl::Status& status);

// What --help prints.
std::string HelpText(const CommandSpec& spec);

// The name in `known` that `typed` was probably meant to be (at most two edits away), or "".
std::string Nearest(absl::string_view typed, absl::Span<const std::string> known);

class Args {
 public:
  static absl::StatusOr<Args> Parse(const CommandSpec& spec,
                                    absl::Span<const char* const> arguments);

  bool Has(absl::string_view flag) const;
  std::string String(absl::string_view flag, absl::string_view fallback) const;
  std::vector<std::string> All(absl::string_view flag) const;  // in the order given
  absl::StatusOr<int64_t> Int(absl::string_view flag, int64_t fallback, int64_t least,
                              int64_t most) const;
  absl::StatusOr<double> Double(absl::string_view flag, double fallback, double least,
                                double most) const;
  // "1,8,64"; empty when the flag is absent.
  absl::StatusOr<std::vector<int64_t>> IntList(absl::string_view flag, int64_t least,
                                               int64_t most) const;
  const std::vector<std::string>& positional() const { return positional_; }

 private:
  absl::Status ParseFlag(const CommandSpec& spec, absl::Span<const char* const> arguments,
                         size_t& index);

  std::map<std::string, std::vector<std::string>, std::less<>> values_;
  std::vector<std::string> positional_;
};

}  // namespace espalier::cli
