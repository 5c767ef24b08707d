// run_line.h — one run of the command line tool inside a test: its exit code and what it printed.
#pragma once

#include <string>
#include <vector>

#include "clients/cli/command.h"
#include "gtest/gtest.h"

namespace espalier::cli {

struct Outcome {
  int code;
  std::string out, err;
};

inline Outcome RunLine(std::vector<std::string> arguments) {
  std::vector<const char*> pointers;
  for (const std::string& argument : arguments) pointers.push_back(argument.c_str());
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  const int code = RunCommandLine(pointers);
  return {code, ::testing::internal::GetCapturedStdout(), ::testing::internal::GetCapturedStderr()};
}

}  // namespace espalier::cli
