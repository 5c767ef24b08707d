#include "engine/updates/create_delta.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"
#include "engine/updates/weight_digest.h"
#include "engine/updates/zstd.h"

namespace espalier::updates {
namespace {

// zstd's strongest ordinary level, at 1 to 2 MB/s, is for what is a header and a graph; tokenizers
// and stray files above that are compressed at 100 times the speed.
constexpr uint64_t kSmallRestBytes = 4 << 20;
constexpr int kSmallRestLevel = 19, kLargeRestLevel = 6;

// A matrix is turned in memory to compare it; larger ones are not tried.
constexpr int64_t kMaxTransposedBytes = int64_t{1} << 30;

// Contents of a tensor, without its name; with `transposed` those of its transpose.
absl::StatusOr<Digest> ContentOf(const Checkpoint& checkpoint, size_t index, bool transposed) {
  TensorInfo info = checkpoint.tensors()[index];
  std::vector<char> elements(static_cast<size_t>(info.bytes));
  auto status = checkpoint.Read(index, 0, info.elements(), elements.data());
  if (!status.ok()) return status;
  if (transposed) {
    const auto rows = static_cast<size_t>(info.dims[0]),
               columns = static_cast<size_t>(info.dims[1]);
    const size_t size = elements.size() / std::max<size_t>(rows * columns, 1);
    std::vector<char> turned(elements.size());
    for (size_t r = 0; r < rows; ++r) {
      for (size_t c = 0; c < columns; ++c)
        std::memcpy(&turned[(c * rows + r) * size], &elements[(r * columns + c) * size], size);
    }
    elements.swap(turned);
    std::swap(info.dims[0], info.dims[1]);
  }
  info.name.clear();
  TensorDigester digester(info);
  digester.Update(elements.data(), info.elements());
  return digester.Finish();
}

class Matcher {
 public:
  Matcher(const Checkpoint& before, const Checkpoint& after) : before_(before), after_(after) {
    match_.to_new.assign(before.tensors().size(), -1);
    match_.to_old.assign(after.tensors().size(), -1);
  }

  absl::StatusOr<TensorMatch> Run() {
    if (before_.format() == Checkpoint::Format::kOnnx) {
      if (auto status = ByUse(); !status.ok()) return status;
    }
    for (size_t i = 0; i < match_.to_old.size(); ++i) {
      if (match_.to_old[i] >= 0) continue;
      const int64_t old = FindTensor(before_.tensors(), after_.tensors()[i].name);
      if (old >= 0 && match_.to_new[static_cast<size_t>(old)] < 0)
        Pair(static_cast<size_t>(old), i);
    }
    for (const bool transposed : {false, true}) {
      if (auto status = ByContent(transposed); !status.ok()) return status;
    }
    match_.schema_changes = before_.tensors() != after_.tensors();
    return std::move(match_);
  }

 private:
  // Only tensors of equal dtype and dims have elements that correspond.
  void Pair(size_t before, size_t after) {
    const TensorInfo &a = before_.tensors()[before], &b = after_.tensors()[after];
    if (a.dtype != b.dtype || a.dims != b.dims) return;
    match_.to_new[before] = static_cast<int64_t>(after);
    match_.to_old[after] = static_cast<int64_t>(before);
  }

  absl::Status ByUse() {
    const auto &was = before_.layout().uses, &is = after_.layout().uses;
    for (size_t i = 0; i < std::min(was.size(), is.size()); ++i) {
      const int64_t before = FindTensor(before_.tensors(), was[i]);
      const int64_t after = FindTensor(after_.tensors(), is[i]);
      if (before < 0 || after < 0) continue;
      const TensorInfo &a = before_.tensors()[static_cast<size_t>(before)],
                       &b = after_.tensors()[static_cast<size_t>(after)];
      if (a.dtype != b.dtype || a.dims != b.dims) {
        return absl::InvalidArgumentError(
            absl::StrCat("the models differ: weight ", b.ToString(), " was ", a.ToString()));
      }
      Pair(static_cast<size_t>(before), static_cast<size_t>(after));
    }
    return absl::OkStatus();
  }

  absl::Status ByContent(bool transposed) {
    std::map<Digest, size_t> left_over;
    const auto fits = [&](const TensorInfo& tensor) {
      return tensor.bytes <= kMaxTransposedBytes && tensor.bytes > 0 &&
             (!transposed || tensor.dims.size() == 2);
    };
    const bool any_new = std::any_of(match_.to_old.begin(), match_.to_old.end(),
                                     [](int64_t old) { return old < 0; });
    for (size_t i = 0; any_new && i < match_.to_new.size(); ++i) {
      if (match_.to_new[i] >= 0 || turned_.count(i) || !fits(before_.tensors()[i])) continue;
      const auto digest = ContentOf(before_, i, transposed);
      if (!digest.ok()) return digest.status();
      left_over.emplace(*digest, i);
    }
    for (size_t i = 0; !left_over.empty() && i < match_.to_old.size(); ++i) {
      if (match_.to_old[i] >= 0 || !fits(after_.tensors()[i])) continue;
      const auto digest = ContentOf(after_, i, false);
      if (!digest.ok()) return digest.status();
      const auto found = left_over.find(*digest);
      if (found == left_over.end()) continue;
      if (transposed) {
        match_.to_old[i] = static_cast<int64_t>(found->second) + Checkpoint::kTransposed;
        turned_.emplace(found->second, i);
      } else {
        Pair(found->second, i);
      }
      left_over.erase(found);
    }
    return absl::OkStatus();
  }

  const Checkpoint& before_;
  const Checkpoint& after_;
  TensorMatch match_;
  std::map<size_t, size_t> turned_;
};

absl::Status CheckSameModel(const Checkpoint& before, const Checkpoint& after) {
  if (before.format() != after.format()) {
    return absl::InvalidArgumentError(
        absl::StrCat(formats::Quoted(before.path(), formats::kShownPathBytes), " and ",
                     formats::Quoted(after.path(), formats::kShownPathBytes),
                     " are of two formats: expected two .onnx files, two .safetensors files or two "
                     "folders"));
  }
  if (before.layout().architecture == after.layout().architecture) return absl::OkStatus();
  const auto difference = formats::OnnxDifference(before.path(), after.path());
  if (!difference.ok()) return difference.status();
  return absl::InvalidArgumentError(
      absl::StrCat("the models differ in more than weights: ", *difference));
}

}  // namespace

absl::StatusOr<TensorMatch> MatchCheckpoints(const Checkpoint& before, const Checkpoint& after) {
  if (auto status = CheckSameModel(before, after); !status.ok()) return status;
  return Matcher(before, after).Run();
}

absl::StatusOr<Manifest> CreateDelta(const Checkpoint& before, const Checkpoint& after,
                                     const std::string& out, const CreateOptions& options) {
  if (auto status = CheckSigners(options.keys); !status.ok()) return status;
  auto writer = DeltaWriter::Create(out);
  if (!writer.ok()) return writer.status();
  const auto match = MatchCheckpoints(before, after);
  if (!match.ok()) return match.status();
  Manifest manifest;
  manifest.model = options.model;
  manifest.base_version = options.base_version;
  manifest.target_version = options.target_version;
  manifest.sequence = options.sequence;
  manifest.created_seconds = options.created_seconds;
  manifest.expires_seconds = options.expires_seconds;
  manifest.schema_changes = match->schema_changes;

  TensorMap own(before.tensors().size());
  for (size_t i = 0; i < own.size(); ++i) own[i] = static_cast<int64_t>(i);
  const auto was = before.Skeleton(own);
  if (!was.ok()) return was.status();
  const auto is = after.Skeleton(match->to_old);
  if (!is.ok()) return is.status();
  if (*was != *is) {
    const bool small = is->size() + was->size() <= kSmallRestBytes;
    const auto frame = ZstdCompress(*is, small ? kSmallRestLevel : kLargeRestLevel, *was);
    if (!frame.ok()) return frame.status();
    if (auto status = writer->AddRest(*frame, is->size()); !status.ok()) return status;
  }

  // Whole files are hashed beside the weights: neither waits for the other.
  absl::StatusOr<Digest> files[2];
  std::thread hashing([&] {
    files[0] = before.FilesDigest();
    files[1] = after.FilesDigest();
  });
  const auto encoded = EncodeWeights(
      before, after, match->to_new,
      [&](size_t tensor, int64_t segment, absl::string_view record) {
        return writer->AddRecord({tensor, segment}, record);
      },
      options.weights);
  hashing.join();
  if (!encoded.ok()) return encoded.status();
  for (const auto& digest : files) {
    if (!digest.ok()) return digest.status();
  }
  manifest.base_weights = HalfOf(encoded->base);
  manifest.target_weights = encoded->target;
  manifest.files = JoinEnds(*files[0], *files[1]);
  manifest.base_nonzeros = encoded->base_nonzeros;
  manifest.target_nonzeros = encoded->target_nonzeros;
  manifest.tensors = encoded->tensors;
  if (auto status = writer->Finish(manifest, options.keys); !status.ok()) return status;
  return manifest;
}

}  // namespace espalier::updates
