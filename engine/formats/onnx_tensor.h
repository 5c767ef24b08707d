// onnx_tensor.h — constants of an ONNX file (TensorProto, SparseTensorProto) decoded into tensors.
//
// Sizes are compared with the shape, and limits checked, before memory is reserved. Messages name
// neither file nor tensor: the caller, who knows them, puts them in front.
#pragma once

#include <onnx/onnx_pb.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/formats/onnx_types.h"
#include "engine/formats/reader.h"
#include "engine/formats/regular_file.h"
#include "engine/tensor/tensor.h"

namespace espalier::formats {

// Element count of `dims` (any container of int64). InvalidArgument for a negative dimension, more
// than kMaxRank dimensions or more than 2^62 elements.
absl::StatusOr<int64_t> CheckedElementCount(absl::Span<const int64_t> dims);

// Where a tensor's external data is; length −1: to the end of the file. The location is not checked.
struct ExternalRange {
  std::string location;
  int64_t offset = 0;
  int64_t length = -1;
};
absl::StatusOr<ExternalRange> ExternalRangeOf(const onnx::TensorProto& proto);

// Row-major position of each entry of a sparse tensor whose decoded indices are given: in range and
// ascending, or InvalidArgument.
absl::StatusOr<std::vector<int64_t>> OnnxSparsePositions(const onnx::SparseTensorProto& proto,
                                                         const Tensor& indices);

// Decodes the constants of one model and adds up what they take. External data is looked for in
// `files`, or when that is null below `directory`; an empty directory refuses it.
class OnnxConstants {
 public:
  OnnxConstants(std::string directory, const ReadLimits& limits,
                const FilesInMemory* files = nullptr)
      : directory_(std::move(directory)), limits_(limits), files_(files) {}

  absl::StatusOr<Tensor> Dense(const onnx::TensorProto& proto);
  absl::StatusOr<Tensor> Sparse(const onnx::SparseTensorProto& proto);

 private:
  absl::Status Spend(int64_t bytes);
  absl::Status CheckExpansion(int64_t dense_bytes, int64_t stored_bytes);
  absl::StatusOr<Tensor> Stored(const onnx::TensorProto& proto, const OnnxElementType& type,
                                int64_t elements);
  absl::StatusOr<Tensor> External(const onnx::TensorProto& proto, DType dtype, int64_t bytes);
  absl::Status OpenExternal(const std::string& location);
  absl::Status ReadExternal(int64_t offset, void* to, int64_t bytes) const;

  const std::string directory_;
  const ReadLimits limits_;
  const FilesInMemory* const files_;
  int64_t total_bytes_ = 0;            // of all constants so far
  int64_t expanded_bytes_ = 0;         // of sparse ones, dense
  int64_t expanded_stored_bytes_ = 0;  // of sparse ones, as stored
  // The last external file: most models have one for all tensors.
  std::string external_location_;
  std::optional<RegularFile> external_;
  const std::string* external_memory_ = nullptr;
  int64_t external_size_ = 0;
};

}  // namespace espalier::formats
