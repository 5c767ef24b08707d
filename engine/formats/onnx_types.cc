#include "engine/formats/onnx_types.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace espalier::formats {
namespace {

constexpr DType kNoDType = DType::kBytes;

// Numbers and stores as in onnx.proto of IR version 13.
constexpr OnnxElementType kElementTypes[] = {
    {1, "FLOAT", OnnxStore::kFloat, DType::kFloat32},
    {2, "UINT8", OnnxStore::kInt32, DType::kUint8},
    {3, "INT8", OnnxStore::kInt32, DType::kInt8},
    {4, "UINT16", OnnxStore::kInt32, DType::kUint16},
    {5, "INT16", OnnxStore::kInt32, DType::kInt16},
    {6, "INT32", OnnxStore::kInt32, DType::kInt32},
    {7, "INT64", OnnxStore::kInt64, DType::kInt64},
    {8, "STRING", OnnxStore::kNone, kNoDType},
    {9, "BOOL", OnnxStore::kInt32, DType::kBool},
    {10, "FLOAT16", OnnxStore::kInt32, DType::kFloat16},
    {11, "DOUBLE", OnnxStore::kDouble, DType::kFloat64},
    {12, "UINT32", OnnxStore::kUint64, DType::kUint32},
    {13, "UINT64", OnnxStore::kUint64, DType::kUint64},
    {14, "COMPLEX64", OnnxStore::kNone, kNoDType},
    {15, "COMPLEX128", OnnxStore::kNone, kNoDType},
    {16, "BFLOAT16", OnnxStore::kInt32, DType::kBFloat16},
    {17, "FLOAT8E4M3FN", OnnxStore::kNone, kNoDType},
    {18, "FLOAT8E4M3FNUZ", OnnxStore::kNone, kNoDType},
    {19, "FLOAT8E5M2", OnnxStore::kNone, kNoDType},
    {20, "FLOAT8E5M2FNUZ", OnnxStore::kNone, kNoDType},
    {21, "UINT4", OnnxStore::kNone, kNoDType},
    {22, "INT4", OnnxStore::kNone, kNoDType},
    {23, "FLOAT4E2M1", OnnxStore::kNone, kNoDType},
    {24, "FLOAT8E8M0", OnnxStore::kNone, kNoDType},
    {25, "UINT2", OnnxStore::kNone, kNoDType},
    {26, "INT2", OnnxStore::kNone, kNoDType},
};

}  // namespace

absl::StatusOr<OnnxElementType> OnnxElementTypeOf(int64_t number) {
  if (number == 0) return absl::InvalidArgumentError("no element type is given");
  for (const OnnxElementType& type : kElementTypes) {
    if (type.number != number) continue;
    if (type.store != OnnxStore::kNone) return type;
    return absl::UnimplementedError(absl::StrCat("element type ", type.name, " is not supported"));
  }
  return absl::UnimplementedError(absl::StrCat("element type ", number, " is not known"));
}

}  // namespace espalier::formats
