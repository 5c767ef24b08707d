// child_process.h — a server in a process of its own, that says its ports in a file when it is
// ready.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace espalier::bench {

class ChildProcess {
 public:
  // Starts `command`; its output goes to `log`. Dies with the bench.
  ChildProcess(std::vector<std::string> command, const std::string& log);
  // SIGTERM, and waits.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;

  // Waits until `ready_file` exists and returns the number behind "grpc_port" in it; exits the
  // bench with a message when the child ends or takes longer than a minute.
  int AwaitPort(const std::string& ready_file) const;

 private:
  std::vector<std::string> command_;
  const std::string log_;
  pid_t pid_ = -1;
};

}  // namespace espalier::bench
