// state_dir.h — the directory that belongs to one server process: plan caches now, journals and
// version state later.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace espalier::runtime {

class StateDir {
 public:
  // Creates `path` if need be and locks it (flock on `<path>/lock`, released by the kernel when the
  // process ends, however it ends). Unavailable, with the owner's process id, when another process
  // holds it; PermissionDenied when it cannot be written.
  static absl::StatusOr<std::unique_ptr<StateDir>> Open(const std::string& path);
  ~StateDir();
  StateDir(const StateDir&) = delete;

  const std::string& path() const { return path_; }
  // Where plan caches go; empty when that is no directory and cannot become one.
  const std::string& plans() const { return plans_; }

 private:
  StateDir(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}

  const std::string path_;
  const int lock_;
  std::string plans_;
};

}  // namespace espalier::runtime
