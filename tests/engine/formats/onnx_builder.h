// onnx_builder.h — small ONNX models in code, and what their readers are expected to say.
#pragma once

#include <onnx/onnx_pb.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/formats/model_graph.h"
#include "engine/formats/reader.h"

namespace espalier::testing {

// x FP32 [N, 3] → Gemm "fc" (w FP32 [2, 3], b FP32 [2], transB = 1) → h → Relu "relu" → y FP32 [N, 2].
// w is [[1, 0, 2], [0, 3, 0]], in raw_data; b is [4, 5], in float_data.
onnx::ModelProto SmallModel();

onnx::NodeProto* AddNode(onnx::ModelProto& model, const std::string& name, const std::string& op,
                         const std::vector<std::string>& inputs,
                         const std::vector<std::string>& outputs);
// An attribute with its type set; the caller fills the value.
onnx::AttributeProto* AddAttribute(onnx::NodeProto& node, const std::string& name,
                                   onnx::AttributeProto::AttributeType type);
onnx::TensorProto MakeTensor(const std::string& name, int type, const std::vector<int64_t>& dims);
template <typename T>
onnx::TensorProto MakeRaw(const std::string& name, int type, const std::vector<int64_t>& dims,
                          const std::vector<T>& values) {
  onnx::TensorProto tensor = MakeTensor(name, type, dims);
  tensor.set_raw_data(values.data(), values.size() * sizeof(T));
  return tensor;
}
// FP32 values at INT64 indices of the shape [values] or [values, dims].
onnx::SparseTensorProto MakeSparse(const std::string& name, const std::vector<int64_t>& dims,
                                   const std::vector<float>& values,
                                   const std::vector<int64_t>& index_dims,
                                   const std::vector<int64_t>& indices);
// {"location", …}, {"offset", …}: makes the tensor external.
void SetExternal(onnx::TensorProto& tensor,
                 std::initializer_list<std::pair<const char*, std::string>> entries);

// As ReadOnnxBytes, from the serialized model, with the source "m.onnx".
absl::StatusOr<formats::ModelGraph> Read(const onnx::ModelProto& model,
                                         const std::string& directory = "",
                                         const formats::ReadLimits& limits = {});

// The elements of a tensor, for comparison.
template <typename T>
std::vector<T> Elements(const Tensor& tensor) {
  return {tensor.As<T>(), tensor.As<T>() + tensor.elements()};
}

// Fails the test unless `status` has `code` and its message every one of `parts`.
void ExpectRefused(const absl::Status& status, absl::StatusCode code,
                   const std::vector<std::string>& parts);

// A directory of its own for a test, removed with all in it at the end.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  const std::string& path() const { return path_; }
  // Writes a file below the folder, creating folders on the way, and returns its path.
  std::string Write(const std::string& name, const std::string& contents) const;

 private:
  std::string path_;
};

}  // namespace espalier::testing
