#include "clients/cli/command.h"

int main(int argc, char** argv) {
  return espalier::cli::RunCommandLine(absl::MakeConstSpan(argv + (argc > 0), argc - (argc > 0)));
}
