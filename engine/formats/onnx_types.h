// onnx_types.h — element types by their ONNX number (TensorProto.DataType), as used in tensors,
// values and Cast's `to`.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/base/dtype.h"

namespace espalier::formats {

// The field of a TensorProto that stores elements of a type when they are not in raw_data.
enum class OnnxStore { kNone, kFloat, kInt32, kInt64, kDouble, kUint64 };

struct OnnxElementType {
  int32_t number;
  const char* name;
  OnnxStore store;  // kNone: a type that Espalier has no elements for; dtype is meaningless
  DType dtype;
};

// InvalidArgument for UNDEFINED; Unimplemented, with the name, for STRING, complex and sub-byte
// types and for numbers that ONNX had not given when this was written.
absl::StatusOr<OnnxElementType> OnnxElementTypeOf(int64_t number);

}  // namespace espalier::formats
