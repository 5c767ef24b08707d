#include <algorithm>
#include <iostream>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "clients/cli/build_info.h"
#include "clients/cli/command.h"

namespace espalier::cli {
namespace {

const std::vector<Command>& Commands() {
  static const auto* const commands = new std::vector<Command>{
      ModelsCommand(),        InferCommand(),         EvaluateCommand(),     BenchCommand(),
      InspectCommand(),       PlanCommand(),          AdviseCommand(),       DeltaCreateCommand(),
      DeltaShowCommand(),     DeltaVerifyCommand(),   DeltaApplyCommand(),   DeltaComposeCommand(),
      DeltaPushCommand(),     DeltaActivateCommand(), DeltaConfirmCommand(), DeltaRollbackCommand(),
      DeltaVersionsCommand(), DeltaLogCommand(),      DeltaWatchCommand(),   DeltaFetchCommand(),
      KeygenCommand(),
  };
  return *commands;
}

// Of the commands whose names begin so.
std::string Overview(absl::string_view prefix = "") {
  std::string text =
      "espalier — serve sparse-pruned networks: client and offline tools\n\n"
      "Usage: espalier COMMAND [arguments] [flags]\n\nCommands:\n";
  for (const Command& command : Commands()) {
    if (!absl::StartsWith(command.spec.name, prefix)) continue;
    absl::StrAppend(&text, "  ", command.spec.name, std::string(15 - command.spec.name.size(), ' '),
                    command.spec.summary, "\n");
  }
  absl::StrAppend(
      &text,
      "\n'espalier COMMAND --help' explains a command, with examples; --version says which "
      "build this is.\n"
      "Exit codes: 0 done, 1 failed, 2 the command line is wrong.\n");
  return text;
}

bool WantsHelp(absl::Span<const char* const> arguments) {
  for (absl::string_view argument : arguments) {
    if (argument == "--") return false;
    if (argument == "--help" || argument == "-h") return true;
  }
  return false;
}

int Fail(const absl::Status& status) {
  std::cerr << "espalier: " << status.message() << "\n";
  return IsWrongUsage(status) ? kExitUsage : kExitFailure;
}

int Run(const Command& command, absl::Span<const char* const> arguments) {
  if (WantsHelp(arguments)) {
    std::cout << HelpText(command.spec);
    return kExitOk;
  }
  absl::StatusOr<Args> args = Args::Parse(command.spec, arguments);
  if (!args.ok()) return Fail(args.status());
  absl::Status status = command.run(*args);
  std::cout.flush();
  // A full disk or a closed pipe must not look like a result.
  if (status.ok() && !std::cout) status = absl::DataLossError("cannot write to standard output");
  return status.ok() ? kExitOk : Fail(status);
}

}  // namespace

int RunCommandLine(absl::Span<const char* const> arguments) {
  if (arguments.empty()) {
    std::cerr << Overview();
    return kExitUsage;
  }
  std::string name = arguments.front();
  if (name == "--help" || name == "-h" || name == "help") {
    std::cout << Overview();
    return kExitOk;
  }
  if (name == "--version") {
    std::cout << "espalier " << BuildVersion() << " (" << BuildCommit() << ")\n";
    return kExitOk;
  }
  size_t words = 1;
  const bool begins_longer = std::any_of(
      Commands().begin(), Commands().end(),
      [&](const Command& command) { return absl::StartsWith(command.spec.name, name + " "); });
  if (begins_longer && arguments.size() > 1) {
    absl::StrAppend(&name, " ", arguments[1]);
    words = 2;
  }
  std::vector<std::string> names;
  for (const Command& command : Commands()) {
    if (command.spec.name == name) return Run(command, arguments.subspan(words));
    names.push_back(command.spec.name);
  }
  if (begins_longer && WantsHelp(arguments)) {
    std::cout << Overview(absl::StrCat(arguments.front(), " "));
    return kExitOk;
  }
  if (begins_longer && words == 1)
    return Fail(
        WrongUsage(absl::StrCat("'", name, "' needs a second word; espalier --help lists them")));
  const std::string nearest = Nearest(name, names);
  return Fail(
      WrongUsage(absl::StrCat("unknown command '", name, "'",
                              nearest.empty() ? "; espalier --help lists them"
                                              : absl::StrCat("; did you mean '", nearest, "'?"))));
}

}  // namespace espalier::cli
