// tensor.h — a named tensor as it travels: datatype and shape in the protocol's words, raw bytes.
//
//   auto pixels = MakeTensor<float>("input", {2, 784}, values);  // error unless 2 · 784 values
//   absl::StatusOr<std::vector<float>> logits = Values<float>(output);  // error unless FP32
//
// Layout   Row-major, little-endian, contiguous. BYTES: per element a 4-byte length and its bytes.
// Types    BOOL, UINT8 … UINT64, INT8 … INT64, FP32, FP64 through C++ types; FP16 and BF16 as raw
//          16-bit patterns, Tensor{name, "BF16", shape, bytes}; BYTES through MakeBytesTensor.
// Errors   InvalidArgument, saying expected and got.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace espalier::client {

struct Tensor {
  std::string name;
  std::string datatype;  // "FP32", "INT64", …
  std::vector<int64_t> shape;
  std::string bytes;
};

// Bytes of one element; 0 for BYTES, InvalidArgument for a name that is no datatype of the
// protocol.
absl::StatusOr<size_t> ElementBytes(absl::string_view datatype);

// Product of the dimensions; InvalidArgument for a negative one or a product beyond int64.
absl::StatusOr<int64_t> ElementCount(absl::Span<const int64_t> shape);

// OK if `tensor.bytes` is what datatype and shape say (BYTES: that number of complete elements).
absl::Status CheckTensor(const Tensor& tensor);

// The protocol's name of a C++ element type; only the types below have one.
template <typename T>
constexpr const char* DatatypeOf() = delete;
template <>
constexpr const char* DatatypeOf<bool>() {
  return "BOOL";
}
template <>
constexpr const char* DatatypeOf<uint8_t>() {
  return "UINT8";
}
template <>
constexpr const char* DatatypeOf<uint16_t>() {
  return "UINT16";
}
template <>
constexpr const char* DatatypeOf<uint32_t>() {
  return "UINT32";
}
template <>
constexpr const char* DatatypeOf<uint64_t>() {
  return "UINT64";
}
template <>
constexpr const char* DatatypeOf<int8_t>() {
  return "INT8";
}
template <>
constexpr const char* DatatypeOf<int16_t>() {
  return "INT16";
}
template <>
constexpr const char* DatatypeOf<int32_t>() {
  return "INT32";
}
template <>
constexpr const char* DatatypeOf<int64_t>() {
  return "INT64";
}
template <>
constexpr const char* DatatypeOf<float>() {
  return "FP32";
}
template <>
constexpr const char* DatatypeOf<double>() {
  return "FP64";
}

template <typename T>
absl::StatusOr<Tensor> MakeTensor(std::string name, std::vector<int64_t> shape,
                                  absl::Span<const T> values) {
  Tensor tensor{
      std::move(name), DatatypeOf<T>(), std::move(shape),
      std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T))};
  if (absl::Status status = CheckTensor(tensor); !status.ok()) return status;
  return tensor;
}

// InvalidArgument unless T is the tensor's datatype.
absl::Status CheckDatatype(const Tensor& tensor, absl::string_view wanted);

template <typename T>
absl::StatusOr<std::vector<T>> Values(const Tensor& tensor) {
  if (absl::Status status = CheckDatatype(tensor, DatatypeOf<T>()); !status.ok()) return status;
  std::vector<T> values(tensor.bytes.size() / sizeof(T));
  // Copied, because the bytes of a received message have no alignment to speak of.
  if (!values.empty()) std::memcpy(values.data(), tensor.bytes.data(), values.size() * sizeof(T));
  return values;
}

absl::StatusOr<Tensor> MakeBytesTensor(std::string name, std::vector<int64_t> shape,
                                       absl::Span<const std::string> values);
absl::StatusOr<std::vector<std::string>> BytesValues(const Tensor& tensor);

}  // namespace espalier::client
