// weight_layout.h — where the weights of a model lie in its files: tensors by name, and the runs of
// bytes ("holes") that follow from their elements. What is not in a hole is the rest.
//
// safetensors  every tensor is one dense hole.
// ONNX         initializers in raw_data, packed float_data or double_data, and external data are one
//              dense hole each. A sparse initializer is two holes, values and indices, when it stores
//              exactly the non-zeros, ascending; the indices raw or packed, linear or as tuples. Others
//              (int32_data and its kin, strings, sub-byte types, attributes of nodes) are rest: they are
//              carried, byte for byte, but have no elements here. A sparse initializer that stores
//              zeros has elements, and its bytes are rest.
// Which bytes are holes is part of the .espd format (engine/updates/FORMAT.md): a change here is a new
// format version.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/formats/regular_file.h"

namespace espalier::formats {

// How a hole follows from the elements of its tensor.
enum class HoleContent : uint8_t {
  kElements = 0,       // all, row-major, little-endian
  kNonzeros = 1,       // those that are not ±0, row-major
  kLinearIndices = 2,  // row-major position of each non-zero, as 8 bytes
  kTupleIndices = 3,   // its index on each axis, as 8 bytes each
  kLinearVarints = 4,  // the same as protobuf varints
  kTupleVarints = 5,
};
inline constexpr uint8_t kHoleContents = 6;

struct WeightHole {
  size_t tensor = 0;
  HoleContent content = HoleContent::kElements;
  uint64_t offset = 0, bytes = 0;  // in its file
};

struct LaidOutTensor {
  std::string name;
  std::string dtype;  // as safetensors names it
  std::vector<int64_t> dims;
  int64_t bytes = 0;  // of all elements
  // A dense one: where they are. A sparse one: what is stored, ascending by position.
  bool sparse = false;
  size_t file = 0;
  uint64_t offset = 0;
  std::vector<int64_t> positions;
  std::string values;
};

struct LaidOutFile {
  std::string name;  // "model.onnx", whatever the file is called, for a single ONNX file
  std::vector<WeightHole> holes;  // ascending, not overlapping
  std::shared_ptr<const RegularFile> file;
};

struct WeightLayout {
  std::vector<LaidOutTensor> tensors;  // ascending by name
  std::vector<LaidOutFile> files;      // ascending by name
  // Everything but weights, in a form that does not depend on what values, nodes and weights are
  // called: for ONNX opset, inputs, outputs and nodes. Empty for safetensors.
  std::string architecture;
  // ONNX: the tensors' names in the order in which the graph uses them: two graphs with the same
  // architecture have the same weight at the same place.
  std::vector<std::string> uses;
};

absl::StatusOr<WeightLayout> ReadOnnxLayout(const std::string& path);
// A .safetensors file.
absl::StatusOr<WeightLayout> ReadSafetensorsLayout(const std::string& path);
// A folder with .safetensors files, as Hugging Face lays it out: all its files except hidden ones,
// without subfolders. An index must say of every tensor where it is.
absl::StatusOr<WeightLayout> ReadSafetensorsFolderLayout(const std::string& path);

// "" when the graphs of two ONNX files are the same but for weights and names; else the first
// difference: "node 3 'fc2' (Gemm): attribute transB is 1, was 0".
absl::StatusOr<std::string> OnnxDifference(const std::string& old_path,
                                           const std::string& new_path);

}  // namespace espalier::formats
