#include "tests/bench/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace espalier::bench {

ChildProcess::ChildProcess(std::vector<std::string> command, const std::string& log)
    : command_(std::move(command)), log_(log) {
  std::vector<char*> arguments;
  for (std::string& argument : command_) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  pid_ = fork();
  if (pid_ != 0) return;
  // It ends with the bench, however the bench ends, and holds none of its files (a lock, say).
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int output = open(log_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  close_range(3, ~0U, 0);
  execv(arguments[0], arguments.data());
  _exit(127);
}

ChildProcess::~ChildProcess() {
  kill(pid_, SIGTERM);
  waitpid(pid_, nullptr, 0);
}

int ChildProcess::AwaitPort(const std::string& ready_file) const {
  for (int i = 0; i < 60000; ++i) {
    std::ostringstream text;
    if (std::ifstream file(ready_file); file) {
      text << file.rdbuf();
      const size_t at = text.str().find("\"grpc_port\": ");
      if (at != std::string::npos) return std::atoi(text.str().c_str() + at + 13);
    }
    if (waitpid(pid_, nullptr, WNOHANG) != 0) break;
    usleep(1000);
  }
  std::fprintf(stderr, "%s did not become ready; its log is %s\n", command_[0].c_str(),
               log_.c_str());
  std::exit(1);
}

}  // namespace espalier::bench
