#include "engine/updates/atomic_file.h"

#include <unistd.h>

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"

namespace espalier::updates {
namespace {

std::string WithoutSlash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string TemporaryName(const std::string& path) {
  static std::atomic<uint64_t> number = 0;
  return absl::StrCat(path, kTemporaryMark, getpid(), "-", number.fetch_add(1));
}

absl::Status Exists(const std::string& path) {
  return absl::AlreadyExistsError(
      absl::StrCat(formats::Quoted(path, formats::kShownPathBytes), " exists already"));
}

absl::Status CheckNothingAt(FileSystem& files, const std::string& path) {
  const auto there = files.Exists(path);
  if (!there.ok()) return there.status();
  return *there ? Exists(path) : absl::OkStatus();
}

absl::Status RenameNew(FileSystem& files, const std::string& from, const std::string& to) {
  const auto status = files.RenameNew(from, to);
  return absl::IsAlreadyExists(status) ? Exists(to) : status;
}

}  // namespace

AtomicFile::AtomicFile(FileSystem& files, std::unique_ptr<File> file, std::string path,
                       std::string temporary)
    : files_(&files),
      file_(std::move(file)),
      path_(std::move(path)),
      temporary_(std::move(temporary)) {}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : files_(other.files_),
      file_(std::move(other.file_)),
      path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, "")),
      size_(other.size_) {}

AtomicFile::~AtomicFile() {
  file_.reset();
  if (!temporary_.empty()) (void)files_->Unlink(temporary_);
}

absl::StatusOr<AtomicFile> AtomicFile::Create(const std::string& path, int mode,
                                              FileSystem& files) {
  const std::string temporary = TemporaryName(path);
  auto file = files.Open(temporary, OpenMode::kCreate, mode);
  if (!file.ok()) return file.status();
  return AtomicFile(files, *std::move(file), path, temporary);
}

absl::StatusOr<AtomicFile> AtomicFile::CreateNew(const std::string& path, int mode,
                                                 FileSystem& files) {
  if (auto status = CheckNothingAt(files, path); !status.ok()) return status;
  return Create(path, mode, files);
}

absl::Status AtomicFile::Append(absl::string_view bytes) {
  if (auto status = AppendAll(*file_, bytes); !status.ok()) return status;
  size_ += bytes.size();
  return absl::OkStatus();
}

absl::Status AtomicFile::ReadAt(uint64_t offset, void* to, uint64_t bytes) const {
  return ReadExactly(*file_, offset, to, bytes);
}

absl::Status AtomicFile::Sync() {
  if (auto status = file_->Sync(); !status.ok()) return status;
  const auto status = file_->Close();
  file_.reset();
  return status;
}

absl::Status AtomicFile::Renamed() {
  temporary_.clear();
  return files_->SyncFolder(FolderOf(path_));
}

absl::Status AtomicFile::Commit() {
  if (auto status = Sync(); !status.ok()) return status;
  if (auto status = files_->Rename(temporary_, path_); !status.ok()) return status;
  return Renamed();
}

absl::Status AtomicFile::CommitNew() {
  if (auto status = Sync(); !status.ok()) return status;
  if (auto status = RenameNew(*files_, temporary_, path_); !status.ok()) return status;
  return Renamed();
}

AtomicFolder::AtomicFolder(FileSystem& files, std::string path, std::string temporary)
    : files_(&files), path_(std::move(path)), temporary_(std::move(temporary)) {}

AtomicFolder::AtomicFolder(AtomicFolder&& other) noexcept
    : files_(other.files_),
      path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, "")) {}

AtomicFolder::~AtomicFolder() {
  if (temporary_.empty()) return;
  if (const auto entries = files_->List(temporary_); entries.ok()) {
    for (const FolderEntry& entry : *entries)
      (void)files_->Unlink(absl::StrCat(temporary_, "/", entry.name));
  }
  (void)files_->RemoveFolder(temporary_);
}

absl::StatusOr<AtomicFolder> AtomicFolder::Create(const std::string& path, FileSystem& files) {
  const std::string place = WithoutSlash(path);
  if (auto status = CheckNothingAt(files, place); !status.ok()) return status;
  const std::string temporary = TemporaryName(place);
  if (auto status = files.MakeFolder(temporary); !status.ok()) return status;
  return AtomicFolder(files, place, temporary);
}

absl::Status AtomicFolder::Commit() {
  if (auto status = files_->SyncFolder(temporary_); !status.ok()) return status;
  if (auto status = RenameNew(*files_, temporary_, path_); !status.ok()) return status;
  temporary_.clear();
  return files_->SyncFolder(FolderOf(path_));
}

}  // namespace espalier::updates
