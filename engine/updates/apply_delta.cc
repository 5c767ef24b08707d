#include "engine/updates/apply_delta.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"
#include "engine/updates/atomic_file.h"
#include "engine/updates/bytes.h"
#include "engine/updates/create_delta.h"
#include "engine/updates/journal.h"
#include "engine/updates/nonzero_bits.h"
#include "engine/updates/weight_digest.h"
#include "engine/updates/zstd.h"

namespace espalier::updates {
namespace {

using formats::HoleContent;

// Writes one file of the target: the skeleton's bytes, and between them the holes.
class FileBuilder {
 public:
  FileBuilder(const PatchedReader& weights, AtomicFile& to,
              const std::function<void(uint64_t)>& written)
      : weights_(weights), to_(to), written_(written) {}

  absl::StatusOr<Digest> Build(const SkeletonFile& file) {
    uint64_t done = 0;
    for (const SkeletonHole& hole : file.holes) {
      auto status = Append(file.bytes.substr(done, hole.offset - done));
      if (!status.ok()) return status;
      done = hole.offset;
      if (status = Fill(hole); !status.ok()) return status;
    }
    if (auto status = Append(file.bytes.substr(done)); !status.ok()) return status;
    return sha_.Finish();
  }

 private:
  absl::Status Append(absl::string_view bytes) {
    sha_.Update(bytes);
    written_(bytes.size());
    return to_.Append(bytes);
  }

  absl::Status Fill(const SkeletonHole& hole) {
    const TensorInfo& tensor = weights_.tensors()[hole.tensor];
    if (hole.transposed) return FillTransposed(hole.tensor);
    std::vector<char> elements;
    for (int64_t first = 0; first < tensor.elements(); first += kSegmentElements) {
      const int64_t count = std::min(kSegmentElements, tensor.elements() - first);
      elements.resize(static_cast<size_t>(count * SizeOf(tensor.kind())));
      auto status = weights_.Read(hole.tensor, first, count, elements.data());
      if (!status.ok()) return status;
      status = hole.content == HoleContent::kElements
                   ? Append({elements.data(), elements.size()})
                   : VisitElement(tensor.kind(), [&](auto element) {
                       using Element = decltype(element);
                       return FillNonzeros<Element>(
                           hole.content, tensor,
                           reinterpret_cast<const typename Element::Bits*>(elements.data()), first,
                           count);
                     });
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  template <typename Element>
  absl::Status FillNonzeros(HoleContent content, const TensorInfo& tensor,
                            const typename Element::Bits* elements, int64_t first, int64_t count) {
    const bool varints =
        content == HoleContent::kLinearVarints || content == HoleContent::kTupleVarints;
    const bool tuples =
        content == HoleContent::kTupleIndices || content == HoleContent::kTupleVarints;
    ByteWriter out;
    const auto index = [&](int64_t value) {
      varints ? out.Varint(static_cast<uint64_t>(value))
              : out.LittleEndian(static_cast<uint64_t>(value), 8);
    };
    for (int64_t i = 0; i < count; ++i) {
      if (Element::IsZero(elements[i])) continue;
      if (content == HoleContent::kNonzeros) {
        out.LittleEndian(elements[i], sizeof(elements[i]));
      } else if (!tuples) {
        index(first + i);
      } else {
        int64_t place = tensor.elements(), rest = first + i;
        for (const int64_t dim : tensor.dims) {
          place /= dim;
          index(rest / place);
          rest %= place;
        }
      }
    }
    return Append(out.bytes());
  }

  absl::Status FillTransposed(size_t index) {
    const TensorInfo& tensor = weights_.tensors()[index];
    std::vector<char> elements(static_cast<size_t>(tensor.bytes)), turned(elements.size());
    auto status = weights_.Read(index, 0, tensor.elements(), elements.data());
    if (!status.ok()) return status;
    const auto rows = static_cast<size_t>(tensor.dims[0]),
               columns = static_cast<size_t>(tensor.dims[1]);
    const size_t size = elements.size() / std::max<size_t>(rows * columns, 1);
    for (size_t r = 0; r < rows; ++r) {
      for (size_t c = 0; c < columns; ++c)
        std::memcpy(&turned[(c * rows + r) * size], &elements[(r * columns + c) * size], size);
    }
    return Append({turned.data(), turned.size()});
  }

  const PatchedReader& weights_;
  AtomicFile& to_;
  const std::function<void(uint64_t)>& written_;
  Sha256 sha_;
};

absl::StatusOr<std::string> TargetSkeleton(const Checkpoint& base, const DeltaFile& delta) {
  TensorMap own(base.tensors().size());
  for (size_t i = 0; i < own.size(); ++i) own[i] = static_cast<int64_t>(i);
  auto was = base.Skeleton(own);
  if (!was.ok() || delta.manifest().rest_bytes == 0) return was;
  const auto frame = delta.RestFrame();
  if (!frame.ok()) return frame.status();
  auto is = ZstdDecompress(*frame, delta.manifest().rest_bytes, *was);
  if (!is.ok())
    return absl::InvalidArgumentError(absl::StrCat("the rest: ", is.status().message()));
  return is;
}

absl::Status CheckBaseWeights(const Checkpoint& base, const DeltaFile& delta, int threads) {
  const auto digest = DigestOf(base, threads);
  if (!digest.ok()) return digest.status();
  const auto status = CheckBase(delta.manifest(), *digest);
  if (status.ok()) return status;
  return absl::Status(
      status.code(),
      absl::StrCat(formats::Quoted(base.path(), formats::kShownPathBytes), ": ", status.message()));
}

// Refuses transposes that would take more memory than a tensor may.
constexpr int64_t kMaxTransposedBytes = int64_t{1} << 30;

absl::Status CheckHoles(const std::vector<SkeletonFile>& files, const Checkpoint& base) {
  for (const SkeletonFile& file : files) {
    for (const SkeletonHole& hole : file.holes) {
      if (hole.transposed && base.tensors()[hole.tensor].bytes > kMaxTransposedBytes)
        return absl::ResourceExhaustedError("a transposed tensor has more than 1 GiB");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ApplyDelta(const Checkpoint& base, const DeltaFile& delta, const std::string& out,
                        const ApplyOptions& options) {
  if (auto status = delta.CheckBody(); !status.ok()) return status;
  if (auto status = CheckBaseWeights(base, delta, options.threads); !status.ok()) return status;
  // Hashed beside the work: files with the right weights are the right ones as a rule.
  auto base_files =
      std::async(std::launch::async, [&] { return base.FilesDigest(options.threads); });
  const auto weights = PatchedReader::Create(delta, base);
  if (!weights.ok()) return weights.status();
  const auto skeleton = TargetSkeleton(base, delta);
  if (!skeleton.ok()) return skeleton.status();
  const auto files = ParseSkeleton(*skeleton, base.tensors());
  if (!files.ok()) return files.status();
  if (auto status = CheckHoles(*files, base); !status.ok()) return status;
  const bool single = (*skeleton)[0] == 1;

  uint64_t done = 0;
  const uint64_t total = static_cast<uint64_t>(base.weight_bytes()) + skeleton->size();
  const std::function<void(uint64_t)> written = [&](uint64_t bytes) {
    done += bytes;
    if (options.progress) options.progress(done, std::max(done, total));
  };
  std::optional<AtomicFolder> folder;
  if (!single) {
    auto created = AtomicFolder::Create(out);
    if (!created.ok()) return created.status();
    folder.emplace(*std::move(created));
  }
  std::vector<FileDigest> digests;
  std::vector<AtomicFile> written_files;
  for (const SkeletonFile& file : *files) {
    auto to = single ? AtomicFile::CreateNew(out)
                     : AtomicFile::Create(absl::StrCat(folder->temporary_path(), "/", file.name));
    if (!to.ok()) return to.status();
    const auto digest = FileBuilder(*weights, *to, written).Build(file);
    if (!digest.ok()) return digest.status();
    digests.push_back({file.name, to->size(), *digest});
    if (single) {
      written_files.push_back(*std::move(to));
    } else if (auto status = to->Commit(); !status.ok()) {
      return status;
    }
  }
  const auto base_digest = base_files.get();
  if (!base_digest.ok()) return base_digest.status();
  const Digest digest = JoinFileDigests(digests, single);
  if (JoinEnds(*base_digest, digest) != delta.manifest().files) {
    return absl::InvalidArgumentError(
        absl::StrCat("files with the digest ", ShortHex(*base_digest),
                     "… became files with the digest ", ShortHex(digest),
                     "…, the delta promises others: its base has these weights, but is not made "
                     "of these files, or the delta was damaged"));
  }
  return single ? written_files[0].CommitNew() : folder->Commit();
}

absl::StatusOr<Manifest> ComposeDeltas(const std::string& base,
                                       const std::vector<std::string>& deltas,
                                       const std::string& out, CreateOptions options) {
  // What CreateDelta would refuse in the end is refused before the work.
  if (auto status = CheckSigners(options.keys); !status.ok()) return status;
  if (const auto place = AtomicFile::Create(out); !place.ok()) return place.status();
  // What lies between is deleted whatever happens.
  struct Scratch {
    std::string path;
    ~Scratch() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  } scratch{absl::StrCat(out, ".compose-", getpid())};
  std::error_code error;
  if (!std::filesystem::create_directory(scratch.path, error))
    return absl::UnknownError(absl::StrCat("cannot create ", scratch.path, ": ", error.message()));
  const auto first = Checkpoint::Open(base);
  if (!first.ok()) return first.status();
  std::string current = base;
  for (size_t i = 0; i < deltas.size(); ++i) {
    auto file = formats::RegularFile::Open(deltas[i]);
    if (!file.ok()) return file.status();
    const auto delta = DeltaFile::Open(std::make_shared<FileSource>(*std::move(file)));
    if (!delta.ok()) return delta.status();
    const Manifest& manifest = delta->manifest();
    if (i == 0) {
      options.model = manifest.model;
      options.base_version = manifest.base_version;
    } else if (auto status = CheckModel(manifest, options.model); !status.ok()) {
      return status;
    }
    options.target_version = manifest.target_version;
    options.sequence = manifest.sequence;
    if (manifest.expires_seconds != 0 &&
        (options.expires_seconds == 0 || manifest.expires_seconds < options.expires_seconds)) {
      options.expires_seconds = manifest.expires_seconds;
    }
    const auto checkpoint = Checkpoint::Open(current);
    if (!checkpoint.ok()) return checkpoint.status();
    const char* suffix =
        (*checkpoint)->format() == Checkpoint::Format::kSafetensors ? ".safetensors" : "";
    const std::string next = absl::StrCat(scratch.path, "/", i, suffix);
    auto status = ApplyDelta(**checkpoint, *delta, next,
                             {.threads = options.weights.threads, .progress = {}});
    if (!status.ok())
      return absl::Status(status.code(), absl::StrCat(deltas[i], ": ", status.message()));
    // Of those in between only the last is needed.
    if (current != base) std::filesystem::remove_all(current, error);
    current = next;
    if (std::filesystem::is_directory(current) &&
        (*checkpoint)->format() == Checkpoint::Format::kOnnx) {
      current += "/model.onnx";
    }
  }
  const auto last = Checkpoint::Open(current);
  if (!last.ok()) return last.status();
  return CreateDelta(**first, **last, out, options);
}

}  // namespace espalier::updates
