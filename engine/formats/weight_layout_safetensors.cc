#include <dirent.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"
#include "engine/formats/safetensors_header.h"
#include "engine/formats/weight_layout.h"

namespace espalier::formats {
namespace {

constexpr absl::string_view kIndexName = "model.safetensors.index.json";
constexpr int64_t kMaxIndexBytes = 100'000'000;
constexpr size_t kMaxFolderFiles = 100'000;

absl::Status InFile(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat(Shown(path, kShownPathBytes), ": ", status.message()));
}

absl::Status AddSafetensors(size_t file_index, WeightLayout& layout) {
  LaidOutFile& file = layout.files[file_index];
  const auto header = ReadSafetensorsHeader(*file.file);
  if (!header.ok()) return InFile(file.file->path(), header.status());
  for (const SafetensorsTensor& tensor : header->tensors) {
    if (tensor.bytes > 0) {
      file.holes.push_back(
          {layout.tensors.size(), HoleContent::kElements, tensor.offset, tensor.bytes});
    }
    LaidOutTensor laid_out;
    laid_out.name = tensor.name;
    laid_out.dtype = tensor.dtype;
    laid_out.dims = tensor.shape;
    laid_out.bytes = static_cast<int64_t>(tensor.bytes);
    laid_out.file = file_index;
    laid_out.offset = tensor.offset;
    layout.tensors.push_back(std::move(laid_out));
  }
  return absl::OkStatus();
}

// Regular files of the folder that are not hidden, ascending.
absl::StatusOr<std::vector<std::string>> FilesIn(const std::string& path) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(path.c_str()), closedir);
  if (!folder) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", Quoted(path)));
  std::vector<std::string> names;
  for (;;) {
    errno = 0;
    const dirent* entry = readdir(folder.get());
    if (entry == nullptr) break;
    if (entry->d_name[0] == '.') continue;
    names.emplace_back(entry->d_name);
    if (names.size() > kMaxFolderFiles) {
      return absl::ResourceExhaustedError(
          absl::StrCat(Quoted(path), " has more than ", kMaxFolderFiles, " files"));
    }
  }
  if (errno != 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot list ", Quoted(path)));
  std::sort(names.begin(), names.end());
  return names;
}

absl::Status CheckIndex(const WeightLayout& layout, const std::string& path,
                        const RegularFile& file) {
  const auto bytes = file.ReadAll(kMaxIndexBytes);
  if (!bytes.ok()) return bytes.status();
  const auto index =
      ParseSafetensorsIndex({reinterpret_cast<const char*>(bytes->data()), bytes->size()});
  if (!index.ok()) return InFile(file.path(), index.status());
  for (const LaidOutTensor& tensor : layout.tensors) {
    const auto found = index->find(tensor.name);
    const std::string& own = layout.files[tensor.file].name;
    if (found != index->end() && found->second == own) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(Shown(path, kShownPathBytes), ": tensor ", Quoted(tensor.name), " is in ",
                     Quoted(own), ", the index says ",
                     found == index->end() ? std::string("nothing of it") : Quoted(found->second)));
  }
  if (index->size() == layout.tensors.size()) return absl::OkStatus();
  for (const auto& [name, in_file] : *index) {
    const auto at = std::lower_bound(
        layout.tensors.begin(), layout.tensors.end(), name,
        [](const LaidOutTensor& tensor, const std::string& key) { return tensor.name < key; });
    if (at != layout.tensors.end() && at->name == name) continue;
    return absl::InvalidArgumentError(absl::StrCat(Shown(path, kShownPathBytes),
                                                   ": the index has the tensor ", Quoted(name),
                                                   " in ", Quoted(in_file), ", where it is not"));
  }
  return absl::OkStatus();
}

// Sorts the tensors by name and tells the holes; refuses a name that two files have.
absl::Status SortTensors(WeightLayout& layout) {
  std::vector<size_t> order(layout.tensors.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return layout.tensors[a].name < layout.tensors[b].name; });
  std::vector<size_t> place(order.size());
  std::vector<LaidOutTensor> sorted;
  for (size_t i = 0; i < order.size(); ++i) {
    place[order[i]] = i;
    sorted.push_back(std::move(layout.tensors[order[i]]));
    if (i > 0 && sorted[i - 1].name == sorted[i].name) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", Quoted(sorted[i].name), " is in ",
                                                     Quoted(layout.files[sorted[i - 1].file].name),
                                                     " and in ",
                                                     Quoted(layout.files[sorted[i].file].name)));
    }
  }
  layout.tensors = std::move(sorted);
  for (LaidOutFile& file : layout.files) {
    for (WeightHole& hole : file.holes) hole.tensor = place[hole.tensor];
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<WeightLayout> ReadSafetensorsLayout(const std::string& path) {
  auto file = RegularFile::Open(path);
  if (!file.ok()) return file.status();
  WeightLayout layout;
  layout.files.push_back(
      {"model.safetensors", {}, std::make_shared<const RegularFile>(*std::move(file))});
  if (auto status = AddSafetensors(0, layout); !status.ok()) return status;
  if (auto status = SortTensors(layout); !status.ok()) return InFile(path, status);
  return layout;
}

absl::StatusOr<WeightLayout> ReadSafetensorsFolderLayout(const std::string& path) {
  const auto names = FilesIn(path);
  if (!names.ok()) return names.status();
  WeightLayout layout;
  std::shared_ptr<const RegularFile> index;
  bool any = false;
  for (const std::string& name : *names) {
    auto file = RegularFile::Open(absl::StrCat(path, "/", name));
    if (!file.ok()) {
      // A folder inside the folder is none of its files.
      const std::unique_ptr<DIR, int (*)(DIR*)> folder(
          opendir(absl::StrCat(path, "/", name).c_str()), closedir);
      if (folder) continue;
      return file.status();
    }
    layout.files.push_back({name, {}, std::make_shared<const RegularFile>(*std::move(file))});
    if (name == kIndexName) index = layout.files.back().file;
    if (!absl::EndsWith(name, ".safetensors")) continue;
    any = true;
    if (auto status = AddSafetensors(layout.files.size() - 1, layout); !status.ok()) return status;
  }
  if (!any) {
    return absl::InvalidArgumentError(
        absl::StrCat(Shown(path, kShownPathBytes), " has no .safetensors file"));
  }
  if (auto status = SortTensors(layout); !status.ok()) return InFile(path, status);
  if (index) {
    if (auto status = CheckIndex(layout, path, *index); !status.ok()) return status;
  }
  return layout;
}

}  // namespace espalier::formats
