#include "engine/runtime/version_content.h"

#include <dirent.h>
#include <openssl/evp.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/formats/regular_file.h"
#include "engine/runtime/infer_request.h"

namespace espalier::runtime {
namespace {

// A version is a model file and its external data; more files than this are no model.
constexpr size_t kMaxFiles = 1 << 16;
constexpr int kMaxDepth = 8;  // also what ends a circle of links

constexpr int64_t kReadBytes = int64_t{1} << 20;

struct FoundFile {
  std::string path;      // below the model's folder
  std::string identity;  // size, times, inode
};

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr);
  }
  void Update(absl::string_view bytes) {
    EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size());
  }
  // With its length in front, so that no two lists of texts are alike.
  void UpdateFramed(absl::string_view text) {
    Update(absl::StrCat(text.size(), ":"));
    Update(text);
  }
  std::string Hex() {
    unsigned char digest[32];
    EVP_DigestFinal_ex(context_.get(), digest, nullptr);
    return absl::BytesToHexString(
        absl::string_view(reinterpret_cast<const char*>(digest), sizeof(digest)));
  }

 private:
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

absl::Status CannotList(const std::string& path, int error) {
  return absl::ErrnoToStatus(error, absl::StrCat("cannot list ", Printable(path)));
}

std::string IdentityOf(const struct stat& info) {
  return absl::StrCat(info.st_size, " ", info.st_mtim.tv_sec, ".", info.st_mtim.tv_nsec, " ",
                      info.st_ctim.tv_sec, ".", info.st_ctim.tv_nsec, " ", info.st_ino);
}

// Adds `<root>/<path>`: itself when it is a regular file, what is below it when it is a folder.
// Links are followed, a mounted Kubernetes volume is made of them. `others`: also what is neither, for
// a load fails for a pipe or a dangling link where a file is expected, and may go well without it.
absl::Status Collect(const std::string& root, const std::string& path, int depth, bool others,
                     std::vector<FoundFile>& files) {
  const std::string full = absl::StrCat(root, "/", path);
  struct stat info;
  if (stat(full.c_str(), &info) != 0) {
    // Gone between listing and looking, or a link to nothing: whoever needs it will say so.
    if (errno != ENOENT && errno != ENOTDIR && errno != ELOOP) return CannotList(full, errno);
    if (!others || lstat(full.c_str(), &info) != 0) return absl::OkStatus();
  }
  if (S_ISREG(info.st_mode) || (others && !S_ISDIR(info.st_mode))) {
    if (files.size() >= kMaxFiles) {
      return absl::ResourceExhaustedError(
          absl::StrCat(Printable(root), " has more than ", kMaxFiles, " files, expected a model"));
    }
    files.push_back({path, IdentityOf(info)});
    return absl::OkStatus();
  }
  if (!S_ISDIR(info.st_mode) || depth >= kMaxDepth) return absl::OkStatus();
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir(full.c_str()), closedir);
  if (directory == nullptr) {
    return errno == ENOENT ? absl::OkStatus() : CannotList(full, errno);
  }
  errno = 0;
  while (const dirent* entry = readdir(directory.get())) {
    if (entry->d_name[0] == '.') continue;
    // Updates are received from there, one by one: they are no change of the model's files.
    if (path == "." && absl::string_view(entry->d_name) == kDeltaFolder) continue;
    auto status =
        Collect(root, path == "." ? entry->d_name : absl::StrCat(path, "/", entry->d_name),
                depth + 1, others, files);
    if (!status.ok()) return status;
    errno = 0;
  }
  return errno == 0 ? absl::OkStatus() : CannotList(full, errno);
}

// What belongs to a version, in the order of the paths.
absl::StatusOr<std::vector<FoundFile>> FilesOf(const std::string& model_directory, int64_t version,
                                               const inference::ModelConfig& config) {
  std::vector<std::string> paths = {absl::StrCat(version)};
  for (const auto& warm_up : config.model_warmup()) {
    for (const auto& [name, input] : warm_up.inputs()) {
      if (!input.input_data_file().empty())
        paths.push_back(absl::StrCat("warmup/", input.input_data_file()));
    }
  }
  for (const auto& output : config.output()) {
    if (!output.label_filename().empty()) paths.push_back(output.label_filename());
  }
  std::vector<FoundFile> files;
  for (const std::string& path : paths) {
    if (auto status = Collect(model_directory, path, 0, false, files); !status.ok()) return status;
  }
  const auto by_path = [](const FoundFile& a, const FoundFile& b) { return a.path < b.path; };
  std::sort(files.begin(), files.end(), by_path);
  return files;
}

std::string Fingerprint(const std::vector<FoundFile>& files, absl::string_view config) {
  Sha256 sha;
  sha.UpdateFramed(config);
  for (const FoundFile& file : files) {
    sha.UpdateFramed(file.path);
    sha.UpdateFramed(file.identity);
  }
  return sha.Hex();
}

}  // namespace

absl::StatusOr<std::string> FingerprintOf(const std::string& model_directory, int64_t version,
                                          const inference::ModelConfig& config) {
  auto files = FilesOf(model_directory, version, config);
  if (!files.ok()) return files.status();
  return Fingerprint(*files, formats::CanonicalBytes(config));
}

absl::StatusOr<std::string> DigestOf(const std::string& model_directory, int64_t version,
                                     const inference::ModelConfig& config) {
  auto files = FilesOf(model_directory, version, config);
  if (!files.ok()) return files.status();
  Sha256 sha;
  sha.UpdateFramed(formats::CanonicalBytes(config));
  std::string buffer(kReadBytes, '\0');
  for (const FoundFile& found : *files) {
    auto file = formats::RegularFile::Open(absl::StrCat(model_directory, "/", found.path));
    if (!file.ok()) return file.status();
    sha.UpdateFramed(found.path);
    sha.Update(absl::StrCat(file->size(), ":"));
    for (int64_t at = 0; at < file->size(); at += kReadBytes) {
      const int64_t bytes = std::min(kReadBytes, file->size() - at);
      if (auto status = file->ReadAt(at, buffer.data(), bytes); !status.ok()) return status;
      sha.Update(absl::string_view(buffer).substr(0, static_cast<size_t>(bytes)));
    }
  }
  return sha.Hex();
}

VersionContent ContentOf(const FilesInMemory& files, const inference::ModelConfig& config) {
  Sha256 sha;
  sha.UpdateFramed("memory");  // never equal to files on disk, which have times
  sha.UpdateFramed(formats::CanonicalBytes(config));
  for (const auto& [path, bytes] : files) {
    sha.UpdateFramed(path);
    sha.UpdateFramed(bytes);
  }
  const std::string digest = sha.Hex();
  return {digest, digest};
}

absl::StatusOr<std::string> ModelFingerprint(const std::string& model_directory) {
  std::vector<FoundFile> files;
  if (auto status = Collect(model_directory, ".", 0, true, files); !status.ok()) return status;
  std::sort(files.begin(), files.end(),
            [](const FoundFile& a, const FoundFile& b) { return a.path < b.path; });
  return Fingerprint(files, "");
}

}  // namespace espalier::runtime
