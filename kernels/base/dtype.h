// dtype.h — element types of tensors, with the names of the Open Inference Protocol.
#pragma once

#include <cstddef>
#include <cstdint>

namespace espalier {

// One line per type: enumerator, Open Inference Protocol name, size in bytes (0: variable, BYTES).
#define ESPALIER_DTYPES(X) \
  X(kBool, "BOOL", 1)      \
  X(kUint8, "UINT8", 1)    \
  X(kUint16, "UINT16", 2)  \
  X(kUint32, "UINT32", 4)  \
  X(kUint64, "UINT64", 8)  \
  X(kInt8, "INT8", 1)      \
  X(kInt16, "INT16", 2)    \
  X(kInt32, "INT32", 4)    \
  X(kInt64, "INT64", 8)    \
  X(kFloat16, "FP16", 2)   \
  X(kFloat32, "FP32", 4)   \
  X(kFloat64, "FP64", 8)   \
  X(kBFloat16, "BF16", 2)  \
  X(kBytes, "BYTES", 0)

enum class DType : uint8_t {
#define ESPALIER_DTYPE_ENUM(name, text, size) name,
  ESPALIER_DTYPES(ESPALIER_DTYPE_ENUM)
#undef ESPALIER_DTYPE_ENUM
};

// Bytes of one element; 0 for kBytes, whose elements have no fixed size.
constexpr size_t SizeOf(DType dtype) {
  constexpr size_t kSizes[] = {
#define ESPALIER_DTYPE_SIZE(name, text, size) size,
      ESPALIER_DTYPES(ESPALIER_DTYPE_SIZE)
#undef ESPALIER_DTYPE_SIZE
  };
  return kSizes[static_cast<size_t>(dtype)];
}

// "FP32", "BF16", …
constexpr const char* NameOf(DType dtype) {
  constexpr const char* kNames[] = {
#define ESPALIER_DTYPE_NAME(name, text, size) text,
      ESPALIER_DTYPES(ESPALIER_DTYPE_NAME)
#undef ESPALIER_DTYPE_NAME
  };
  return kNames[static_cast<size_t>(dtype)];
}

}  // namespace espalier
