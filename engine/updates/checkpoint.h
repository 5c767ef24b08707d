// checkpoint.h — a model's files as weights and the rest: what a delta is made from and applied to.
//
//   an .onnx file (with external data beside it), a .safetensors file, or a folder of .safetensors
//
// The *skeleton* is everything about the files but the elements of the weights: their names, what is
// in no hole, and which holes there are (FORMAT.md). Weights and skeleton give the files back, byte
// for byte.
//
// Memory   A sparse ONNX initializer's values and positions, and for an ONNX file the file itself
//          while it is opened (at most 2 GiB, protobuf's limit). The skeleton: at most kMaxRestBytes.
//          Dense tensors are read from the file piece by piece.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/formats/weight_layout.h"
#include "engine/updates/manifest.h"
#include "engine/updates/sha256.h"
#include "engine/updates/tensor_info.h"

namespace espalier::updates {

class Checkpoint final : public TensorReader {
 public:
  enum class Format { kOnnx, kSafetensors, kFolder };

  // NotFound, InvalidArgument, … naming the file and what is wrong with it.
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& path);

  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  absl::Status Read(size_t tensor, int64_t first, int64_t count, void* to) const override;

  const std::string& path() const { return path_; }
  Format format() const { return format_; }
  // One file, or a folder of several.
  bool is_single_file() const { return format_ != Format::kFolder && layout_.files.size() == 1; }
  const formats::WeightLayout& layout() const { return layout_; }
  int64_t weight_bytes() const;

  // Every byte: SHA-256 over number of files and, ascending by name, name, size and SHA-256 of each;
  // of a single file over its bytes alone. InvalidArgument when a file changed since it was opened.
  absl::StatusOr<Digest> FilesDigest(int threads = 1) const;

  // What is not weights. `names`: for each tensor its index in the base, −1 for one that the base has
  // not, whose bytes then are part of the skeleton; +kTransposed for a transposed one.
  absl::StatusOr<std::string> Skeleton(const std::vector<int64_t>& names) const;
  static constexpr int64_t kTransposed = int64_t{1} << 40;

 private:
  Checkpoint() = default;

  std::string path_;
  Format format_ = Format::kOnnx;
  formats::WeightLayout layout_;
  std::vector<TensorInfo> tensors_;
};

// A skeleton, read back. Everything is checked against the tensors that its holes refer to.
struct SkeletonHole {
  uint64_t offset = 0;  // in `bytes`: what the hole comes after
  size_t tensor = 0;
  formats::HoleContent content = formats::HoleContent::kElements;
  bool transposed = false;
};
struct SkeletonFile {
  std::string name;
  std::vector<SkeletonHole> holes;
  absl::string_view bytes;  // borrowed from the parsed text
};
absl::StatusOr<std::vector<SkeletonFile>> ParseSkeleton(absl::string_view skeleton,
                                                        const std::vector<TensorInfo>& tensors);

// SHA-256 over files whose own digests are known, as FilesDigest.
struct FileDigest {
  std::string name;
  uint64_t bytes = 0;
  Digest digest{};
};
Digest JoinFileDigests(const std::vector<FileDigest>& files, bool single);

}  // namespace espalier::updates
