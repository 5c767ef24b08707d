// command.h — the subcommands and their exit codes.
//
//   0  done            1  it failed (server, file, …)            2  the command line is wrong
//
// Results go to standard output, everything else to standard error. A new subcommand is one file
// beside this, its declaration here and its line in commands.cc. A name may have two words ("delta show").
#pragma once

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "clients/cli/args.h"

namespace espalier::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;

struct Command {
  CommandSpec spec;
  absl::Status (*run)(const Args& args);
};

Command AdviseCommand();
Command BenchCommand();
Command DeltaActivateCommand();
Command DeltaApplyCommand();
Command DeltaComposeCommand();
Command DeltaConfirmCommand();
Command DeltaCreateCommand();
Command DeltaFetchCommand();
Command DeltaLogCommand();
Command DeltaPushCommand();
Command DeltaRollbackCommand();
Command DeltaShowCommand();
Command DeltaVerifyCommand();
Command DeltaVersionsCommand();
Command DeltaWatchCommand();
Command EvaluateCommand();
Command InferCommand();
Command InspectCommand();
Command KeygenCommand();
Command ModelsCommand();
Command PlanCommand();

// Runs the command line (without the program's name) and returns the exit code.
int RunCommandLine(absl::Span<const char* const> arguments);

}  // namespace espalier::cli
