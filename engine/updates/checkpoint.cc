#include "engine/updates/checkpoint.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"
#include "engine/updates/bytes.h"

namespace espalier::updates {
namespace {

using formats::HoleContent;
using formats::LaidOutFile;
using formats::LaidOutTensor;
using formats::WeightHole;

constexpr uint64_t kChunkBytes = 1 << 20;
constexpr uint8_t kTransposedBit = 8;

// Elements [first, first + count) of a sparse tensor.
void Scatter(const LaidOutTensor& tensor, size_t size, int64_t first, int64_t count, void* to) {
  std::memset(to, 0, static_cast<size_t>(count) * size);
  const auto begin = std::lower_bound(tensor.positions.begin(), tensor.positions.end(), first);
  for (auto at = begin; at != tensor.positions.end() && *at < first + count; ++at) {
    std::memcpy(static_cast<char*>(to) + static_cast<size_t>(*at - first) * size,
                tensor.values.data() + static_cast<size_t>(at - tensor.positions.begin()) * size,
                size);
  }
}

absl::StatusOr<Digest> DigestFile(const formats::RegularFile& file) {
  Sha256 sha;
  std::string chunk;
  const auto size = static_cast<uint64_t>(file.size());
  for (uint64_t offset = 0; offset < size; offset += chunk.size()) {
    chunk.resize(std::min(kChunkBytes, size - offset));
    auto status =
        file.ReadAt(static_cast<int64_t>(offset), chunk.data(), static_cast<int64_t>(chunk.size()));
    if (!status.ok()) return status;
    sha.Update(chunk);
  }
  if (auto status = file.CheckUnchanged(); !status.ok()) return status;
  return sha.Finish();
}

// A file without the holes whose tensors the base has.
absl::Status AppendSkeleton(const LaidOutFile& file, const std::vector<int64_t>& names,
                            ByteWriter& out) {
  std::vector<WeightHole> holes;
  for (const WeightHole& hole : file.holes) {
    if (names[hole.tensor] >= 0) holes.push_back(hole);
  }
  out.Text(file.name);
  out.Varint(holes.size());
  std::string bytes;
  uint64_t end = 0, told = 0;
  const auto append_until = [&](uint64_t next) -> absl::Status {
    const size_t before = bytes.size();
    if (next - end > kMaxRestBytes - std::min<uint64_t>(kMaxRestBytes, before + out.size())) {
      return absl::ResourceExhaustedError(absl::StrCat(
          formats::Quoted(file.file->path(), formats::kShownPathBytes), " has ", next - end,
          " bytes at ", end, " that are no weights, the limit for all is ", kMaxRestBytes));
    }
    bytes.resize(before + (next - end));
    return file.file->ReadAt(static_cast<int64_t>(end), bytes.data() + before,
                             static_cast<int64_t>(next - end));
  };
  for (const WeightHole& hole : holes) {
    if (auto status = append_until(hole.offset); !status.ok()) return status;
    end = hole.offset + hole.bytes;
    const int64_t name = names[hole.tensor];
    const bool transposed = name >= Checkpoint::kTransposed;
    out.Varint(bytes.size() - told);
    told = bytes.size();
    out.Varint(static_cast<uint64_t>(transposed ? name - Checkpoint::kTransposed : name));
    out.Byte(static_cast<uint8_t>(static_cast<uint8_t>(hole.content) |
                                  (transposed ? kTransposedBit : 0)));
  }
  if (auto status = append_until(static_cast<uint64_t>(file.file->size())); !status.ok())
    return status;
  out.Text(bytes);
  return absl::OkStatus();
}

absl::StatusOr<SkeletonHole> ReadHole(ByteReader& reader, uint64_t& offset,
                                      const std::vector<TensorInfo>& tensors) {
  SkeletonHole hole;
  const auto gap = reader.Varint("gap before a hole", kMaxRestBytes);
  if (!gap.ok()) return gap.status();
  offset += *gap;
  hole.offset = offset;
  const auto tensor = reader.Varint("tensor of a hole", kMaxTensors);
  if (!tensor.ok()) return tensor.status();
  const auto content = reader.Byte("content of a hole");
  if (!content.ok()) return content.status();
  if (*tensor >= tensors.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a hole is for tensor ", *tensor, " of ", tensors.size()));
  }
  hole.tensor = *tensor;
  hole.transposed = *content & kTransposedBit;
  const uint8_t kind = *content & ~kTransposedBit;
  if (kind >= formats::kHoleContents)
    return absl::InvalidArgumentError(absl::StrCat("a hole has the content ", *content));
  hole.content = static_cast<HoleContent>(kind);
  const TensorInfo& info = tensors[hole.tensor];
  if (hole.transposed && (info.dims.size() != 2 || hole.content != HoleContent::kElements))
    return absl::InvalidArgumentError("a hole transposes what is no matrix");
  if (hole.content != HoleContent::kElements && info.kind() == ElementKind::kByte)
    return absl::InvalidArgumentError("a hole asks for the non-zeros of bytes");
  return hole;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(const std::string& path) {
  struct stat info;
  auto checkpoint = std::unique_ptr<Checkpoint>(new Checkpoint);
  absl::StatusOr<formats::WeightLayout> layout;
  if (stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
    checkpoint->format_ = Format::kFolder;
    layout = formats::ReadSafetensorsFolderLayout(path);
  } else if (absl::EndsWith(path, ".safetensors")) {
    checkpoint->format_ = Format::kSafetensors;
    layout = formats::ReadSafetensorsLayout(path);
  } else {
    layout = formats::ReadOnnxLayout(path);
  }
  if (!layout.ok()) return layout.status();
  checkpoint->path_ = path;
  checkpoint->layout_ = *std::move(layout);
  for (const LaidOutTensor& tensor : checkpoint->layout_.tensors)
    checkpoint->tensors_.push_back({tensor.name, tensor.dtype, tensor.dims, tensor.bytes});
  if (checkpoint->tensors_.size() > kMaxTensors) {
    return absl::ResourceExhaustedError(absl::StrCat(formats::Shown(path), " has ",
                                                     checkpoint->tensors_.size(),
                                                     " tensors, the limit is ", kMaxTensors));
  }
  return checkpoint;
}

absl::Status Checkpoint::Read(size_t tensor, int64_t first, int64_t count, void* to) const {
  const LaidOutTensor& laid_out = layout_.tensors[tensor];
  const int64_t size = SizeOf(tensors_[tensor].kind());
  if (laid_out.sparse) {
    if (tensors_[tensor].kind() != ElementKind::kByte) {
      Scatter(laid_out, static_cast<size_t>(size), first, count, to);
      return absl::OkStatus();
    }
    // Counted in bytes: whole elements around the bytes asked for.
    const int64_t width = static_cast<int64_t>(laid_out.values.size()) /
                          std::max<int64_t>(1, static_cast<int64_t>(laid_out.positions.size()));
    if (width == 0) {
      std::memset(to, 0, static_cast<size_t>(count));
      return absl::OkStatus();
    }
    const int64_t begin = first / width, end = (first + count + width - 1) / width;
    std::vector<char> whole(static_cast<size_t>((end - begin) * width));
    Scatter(laid_out, static_cast<size_t>(width), begin, end - begin, whole.data());
    std::memcpy(to, whole.data() + (first - begin * width), static_cast<size_t>(count));
    return absl::OkStatus();
  }
  return layout_.files[laid_out.file].file->ReadAt(
      static_cast<int64_t>(laid_out.offset) + first * size, to, count * size);
}

int64_t Checkpoint::weight_bytes() const {
  int64_t bytes = 0;
  for (const TensorInfo& tensor : tensors_) bytes += tensor.bytes;
  return bytes;
}

absl::StatusOr<Digest> Checkpoint::FilesDigest(int threads) const {
  std::vector<FileDigest> files(layout_.files.size());
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  absl::Status failure;
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < files.size();) {
      const LaidOutFile& file = layout_.files[i];
      const auto digest = DigestFile(*file.file);
      if (digest.ok()) {
        files[i] = {file.name, static_cast<uint64_t>(file.file->size()), *digest};
        continue;
      }
      const std::lock_guard lock(mutex);
      failure.Update(digest.status());
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads && static_cast<size_t>(i) < files.size(); ++i)
    others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  if (!failure.ok()) return failure;
  return JoinFileDigests(files, is_single_file());
}

Digest JoinFileDigests(const std::vector<FileDigest>& files, bool single) {
  if (single) return files[0].digest;
  ByteWriter out;
  out.Varint(files.size());
  for (const FileDigest& file : files) {
    out.Text(file.name);
    out.Varint(file.bytes);
    out.Raw({reinterpret_cast<const char*>(file.digest.data()), file.digest.size()});
  }
  return Sha256Of(out.bytes());
}

absl::StatusOr<std::string> Checkpoint::Skeleton(const std::vector<int64_t>& names) const {
  ByteWriter out;
  out.Byte(is_single_file());
  out.Varint(layout_.files.size());
  for (const LaidOutFile& file : layout_.files) {
    if (auto status = AppendSkeleton(file, names, out); !status.ok()) return status;
  }
  if (out.size() > kMaxRestBytes) {
    return absl::ResourceExhaustedError(absl::StrCat(formats::Shown(path_), " has ", out.size(),
                                                     " bytes that are no weights, the limit is ",
                                                     kMaxRestBytes));
  }
  return out.Take();
}

absl::StatusOr<std::vector<SkeletonFile>> ParseSkeleton(absl::string_view skeleton,
                                                        const std::vector<TensorInfo>& tensors) {
  ByteReader reader(skeleton);
  const auto single = reader.Byte("kind of the rest");
  if (!single.ok()) return single.status();
  const auto count = reader.Varint("number of files", reader.left());
  if (!count.ok()) return count.status();
  if (*single > 1 || *count == 0 || (*single == 1 && *count != 1))
    return absl::InvalidArgumentError("the rest has no files, or one folder of one kind too many");
  std::vector<SkeletonFile> files;
  // Each tensor has one hole for its values and one for its indices at most: the files do not grow
  // beyond what the base's tensors and the skeleton pay for.
  std::vector<uint8_t> used(tensors.size());
  for (uint64_t i = 0; i < *count; ++i) {
    SkeletonFile file;
    const auto name = reader.Text("name of a file", 255);
    if (!name.ok()) return name.status();
    file.name = std::string(*name);
    if (!formats::IsPathBeneath(file.name) || absl::StrContains(file.name, '/') ||
        !formats::CheckName("a file", file.name).ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("a file is called ", formats::Quoted(file.name), ", expected a plain name"));
    }
    if (!files.empty() && files.back().name >= file.name)
      return absl::InvalidArgumentError("files are not ascending by name, or one is there twice");
    const auto holes = reader.Varint("number of holes", reader.left());
    if (!holes.ok()) return holes.status();
    uint64_t offset = 0;
    for (uint64_t h = 0; h < *holes; ++h) {
      auto hole = ReadHole(reader, offset, tensors);
      if (!hole.ok()) return hole.status();
      const bool indices = hole->content > HoleContent::kNonzeros;
      const auto bit = static_cast<uint8_t>(indices ? 2 : 1);
      if (used[hole->tensor] & bit) {
        return absl::InvalidArgumentError(
            absl::StrCat("two holes for tensor ", formats::Quoted(tensors[hole->tensor].name)));
      }
      used[hole->tensor] |= bit;
      file.holes.push_back(*hole);
    }
    const auto bytes = reader.Text("bytes of a file", reader.left());
    if (!bytes.ok()) return bytes.status();
    if (offset > bytes->size())
      return absl::InvalidArgumentError("a hole lies behind the end of its file");
    file.bytes = *bytes;
    files.push_back(std::move(file));
  }
  if (auto status = reader.End("the rest"); !status.ok()) return status;
  return files;
}

}  // namespace espalier::updates
