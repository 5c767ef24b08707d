#include "engine/updates/file_system.h"

#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"

namespace espalier::updates {

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

absl::Status AppendAll(File& file, absl::string_view bytes) {
  while (!bytes.empty()) {
    const auto written = file.Append(bytes);
    if (!written.ok()) return written.status();
    bytes.remove_prefix(*written);
  }
  return absl::OkStatus();
}

absl::Status ReadExactly(const File& file, uint64_t offset, void* to, uint64_t bytes) {
  while (bytes > 0) {
    const auto got = file.ReadAt(offset, to, bytes);
    if (!got.ok()) return got.status();
    if (*got == 0)
      return absl::DataLossError(absl::StrCat("ends at byte ", offset, ", ", bytes, " too early"));
    to = static_cast<char*>(to) + *got;
    offset += *got;
    bytes -= *got;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadWhole(FileSystem& files, const std::string& path,
                                      uint64_t max_bytes) {
  const auto file = files.Open(path, OpenMode::kRead);
  if (!file.ok()) return file.status();
  const auto size = (*file)->Size();
  if (!size.ok()) return size.status();
  if (*size > max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat(formats::Quoted(path, formats::kShownPathBytes), " has ", *size,
                     " bytes, expected at most ", max_bytes));
  }
  std::string bytes(*size, '\0');
  if (auto status = ReadExactly(**file, 0, bytes.data(), bytes.size()); !status.ok()) return status;
  return bytes;
}

absl::Status EnsureFolder(FileSystem& files, const std::string& path) {
  const auto status = files.MakeFolder(path);
  if (!status.ok() && !absl::IsAlreadyExists(status)) return status;
  return files.SyncFolder(FolderOf(path));  // one that is there may be so since a failed attempt
}

absl::Status UnlinkIfThere(FileSystem& files, const std::string& path) {
  const auto status = files.Unlink(path);
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

absl::StatusOr<std::shared_ptr<const ByteSource>> OpenedSource::Open(FileSystem& files,
                                                                     const std::string& path) {
  auto file = files.Open(path, OpenMode::kRead);
  if (!file.ok()) return file.status();
  const auto size = (*file)->Size();
  if (!size.ok()) return size.status();
  // What is wrong with a delta is told to clients, and kept in the audit log: where it lies on the
  // server is not their business.
  std::string name = absl::StrCat("the delta ", path.substr(path.rfind('/') + 1));
  return std::shared_ptr<const ByteSource>(
      new OpenedSource(*std::move(file), std::move(name), *size));
}

absl::Status OpenedSource::ReadAt(uint64_t offset, void* to, uint64_t bytes) const {
  if (offset > size_ || bytes > size_ - offset)
    return absl::InvalidArgumentError("reads past the end");
  return ReadExactly(*file_, offset, to, bytes);
}

}  // namespace espalier::updates
