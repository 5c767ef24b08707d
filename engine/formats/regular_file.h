// regular_file.h — reading files of strangers: never mapped (truncating a mapped file kills the
// process by SIGBUS), never blocking on a FIFO or device, and a file that changes while it is read
// is an error, not torn data.
#pragma once

#include <cstdint>
#include <ctime>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/tensor/buffer.h"

namespace espalier::formats {

// An open regular file. Movable; closes itself. Thread-safe after Open.
class RegularFile {
 public:
  // Follows symbolic links: a mounted Kubernetes volume is made of them. NotFound when there is no
  // such file; InvalidArgument for a directory, FIFO, device, socket or dangling link; else what
  // errno says.
  static absl::StatusOr<RegularFile> Open(const std::string& path);

  // Opens `relative` below `directory`. InvalidArgument for an absolute path, a ".." or empty
  // component, and for a symbolic link that leads out of the directory (links inside it are
  // followed where the kernel has openat2, and refused where it has not).
  static absl::StatusOr<RegularFile> OpenBeneath(const std::string& directory,
                                                 const std::string& relative);

  RegularFile(RegularFile&& other) noexcept;
  RegularFile& operator=(RegularFile&& other) noexcept;
  ~RegularFile();

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // when it was opened

  // Reads exactly `bytes` at `offset`. InvalidArgument when the file ends before (it was
  // truncated).
  absl::Status ReadAt(int64_t offset, void* to, int64_t bytes) const;

  // The whole file as it was when it was opened. ResourceExhausted above `max_bytes`, before memory
  // is reserved; InvalidArgument when size or modification time changed meanwhile.
  absl::StatusOr<Buffer> ReadAll(int64_t max_bytes) const;

  // InvalidArgument when size or modification time are no longer what they were at Open.
  absl::Status CheckUnchanged() const;

 private:
  RegularFile(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}
  static absl::StatusOr<RegularFile> Adopt(int descriptor, std::string path);

  int descriptor_ = -1;
  std::string path_;
  int64_t size_ = 0;
  timespec modified_ = {};
};

// The fallback of OpenBeneath for kernels and sandboxes without openat2: every component is opened
// without following links. Returns a descriptor, or -1 with errno set. `relative` was checked as
// above. Declared here for its test.
int OpenWithoutLinks(int directory, const std::string& relative, int flags);

// A relative path without empty, "." (except a leading "./"), ".." components and NUL bytes: it
// names something below the folder it is appended to, symbolic links aside.
bool IsPathBeneath(absl::string_view path);

}  // namespace espalier::formats
