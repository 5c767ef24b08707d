#include "clients/cli/file.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>

#include "absl/strings/str_cat.h"

namespace espalier::cli {
namespace {

using FileHandle = std::unique_ptr<FILE, int (*)(FILE*)>;

absl::Status Failed(const char* what, const std::string& path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot ", what, " ", path));
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes) {
  FileHandle file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) return Failed("open", path);
  struct stat info;
  if (fstat(fileno(file.get()), &info) != 0) return Failed("read", path);
  if (S_ISDIR(info.st_mode))
    return absl::InvalidArgumentError(absl::StrCat(path, " is a directory"));
  const auto too_large = [&] {
    return absl::ResourceExhaustedError(absl::StrCat(path, " has more than ", max_bytes, " bytes"));
  };
  if (S_ISREG(info.st_mode) && info.st_size > max_bytes) return too_large();
  std::string content;
  char buffer[1 << 16];
  while (const size_t got = std::fread(buffer, 1, sizeof(buffer), file.get())) {
    if (static_cast<int64_t>(content.size() + got) > max_bytes) return too_large();
    content.append(buffer, got);
  }
  if (std::ferror(file.get())) return Failed("read", path);
  return content;
}

absl::Status CheckWritable(const std::string& path) {
  const FileHandle file(std::fopen(path.c_str(), "ab"), &std::fclose);
  return file ? absl::OkStatus() : Failed("create", path);
}

absl::Status CheckReplaceable(const std::string& path) {
  struct stat info;
  if (lstat(path.c_str(), &info) != 0)
    return errno == ENOENT ? absl::OkStatus() : Failed("look at", path);
  if (S_ISREG(info.st_mode)) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(path, " is there already, and is no regular file"));
}

absl::Status WriteFile(const std::string& path, absl::string_view content) {
  FileHandle file(std::fopen(path.c_str(), "wb"), &std::fclose);
  if (!file) return Failed("create", path);
  const bool written = std::fwrite(content.data(), 1, content.size(), file.get()) == content.size();
  if (!written || std::fclose(file.release()) != 0) return Failed("write", path);
  return absl::OkStatus();
}

}  // namespace espalier::cli
