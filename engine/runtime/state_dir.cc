#include "engine/runtime/state_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "engine/runtime/log.h"

namespace espalier::runtime {
namespace {

absl::Status CreateDirectory(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (!error) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("cannot create state directory ", path, ": ", error.message()));
}

std::string OwnerOf(int lock) {
  char text[32] = {};
  const ssize_t bytes = pread(lock, text, sizeof(text) - 1, 0);
  return bytes > 0 ? std::string(absl::StripAsciiWhitespace(text)) : "unknown";
}

}  // namespace

absl::StatusOr<std::unique_ptr<StateDir>> StateDir::Open(const std::string& path) {
  if (absl::Status status = CreateDirectory(path); !status.ok()) return status;
  const std::string file = path + "/lock";
  const int lock = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (lock < 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("cannot open ", file, ": ", std::strerror(errno)));
  }
  if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    const absl::Status status = absl::UnavailableError(
        errno == EWOULDBLOCK ? absl::StrCat("state directory ", path, " is in use by process ",
                                            OwnerOf(lock), "; each server needs its own")
                             : absl::StrCat("cannot lock ", file, ": ", std::strerror(errno)));
    close(lock);
    return status;
  }
  std::unique_ptr<StateDir> dir(new StateDir(path, lock));
  // The number is for people; the lock is what counts, so a failed write is no error.
  const std::string owner = absl::StrCat(getpid(), "\n");
  if (ftruncate(lock, 0) == 0) (void)!pwrite(lock, owner.data(), owner.size(), 0);
  const std::string plans = path + "/plans";
  if (absl::Status status = CreateDirectory(plans); status.ok()) {
    dir->plans_ = plans;
  } else {
    LogEvent(spdlog::level::warn, "plans are not kept", {{"reason", status.message()}});
  }
  return dir;
}

StateDir::~StateDir() { close(lock_); }

}  // namespace espalier::runtime
