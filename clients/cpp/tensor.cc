#include "clients/cpp/tensor.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/dtype.h"

namespace espalier::client {
namespace {

struct Datatype {
  absl::string_view name;
  size_t bytes;
};
constexpr Datatype kDatatypes[] = {
#define ESPALIER_CLIENT_DATATYPE(enumerator, name, bytes) {name, bytes},
    ESPALIER_DTYPES(ESPALIER_CLIENT_DATATYPE)
#undef ESPALIER_CLIENT_DATATYPE
};
constexpr size_t kLengthBytes = 4;

std::string Describe(const Tensor& tensor) {
  return absl::StrCat("tensor '", tensor.name, "' (", tensor.datatype, " [",
                      absl::StrJoin(tensor.shape, ", "), "])");
}

// Length of the BYTES element that starts at `offset`, or -1 when the rest of `bytes` is too short
// for it.
int64_t ElementLength(const std::string& bytes, size_t offset) {
  if (bytes.size() - offset < kLengthBytes) return -1;
  uint32_t length = 0;
  std::memcpy(&length, bytes.data() + offset, kLengthBytes);
  return length <= bytes.size() - offset - kLengthBytes ? int64_t{length} : -1;
}

}  // namespace

absl::StatusOr<size_t> ElementBytes(absl::string_view datatype) {
  for (const Datatype& known : kDatatypes) {
    if (known.name == datatype) return known.bytes;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", datatype, "' is no datatype; expected one of ",
                   absl::StrJoin(kDatatypes, ", ", [](std::string* out, const Datatype& known) {
                     absl::StrAppend(out, known.name);
                   })));
}

absl::StatusOr<int64_t> ElementCount(absl::Span<const int64_t> shape) {
  int64_t count = 1;
  for (int64_t dim : shape) {
    if (dim < 0 || (dim > 0 && count > std::numeric_limits<int64_t>::max() / dim)) {
      return absl::InvalidArgumentError(
          absl::StrCat("shape [", absl::StrJoin(shape, ", "), "] ",
                       dim < 0 ? "has a negative dimension" : "is too large"));
    }
    count *= dim;
  }
  return count;
}

absl::Status CheckTensor(const Tensor& tensor) {
  absl::StatusOr<size_t> element_bytes = ElementBytes(tensor.datatype);
  if (!element_bytes.ok()) return element_bytes.status();
  absl::StatusOr<int64_t> count = ElementCount(tensor.shape);
  if (!count.ok()) return count.status();
  if (*element_bytes == 0) {
    absl::StatusOr<std::vector<std::string>> values = BytesValues(tensor);
    return values.ok() ? absl::OkStatus() : values.status();
  }
  if (tensor.bytes.size() / *element_bytes == static_cast<uint64_t>(*count) &&
      tensor.bytes.size() % *element_bytes == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(Describe(tensor), ": expected ", *count,
                                                 " elements of ", *element_bytes, " bytes, got ",
                                                 tensor.bytes.size(), " bytes"));
}

absl::Status CheckDatatype(const Tensor& tensor, absl::string_view wanted) {
  if (tensor.datatype == wanted) return CheckTensor(tensor);
  return absl::InvalidArgumentError(absl::StrCat(Describe(tensor), ": read as ", wanted,
                                                 ", but its datatype is ", tensor.datatype));
}

absl::StatusOr<Tensor> MakeBytesTensor(std::string name, std::vector<int64_t> shape,
                                       absl::Span<const std::string> values) {
  Tensor tensor{std::move(name), "BYTES", std::move(shape), {}};
  for (const std::string& value : values) {
    if (value.size() > std::numeric_limits<uint32_t>::max()) {
      return absl::InvalidArgumentError(absl::StrCat(Describe(tensor), ": an element has ",
                                                     value.size(), " bytes; the limit is 4 GiB"));
    }
    const uint32_t length = static_cast<uint32_t>(value.size());
    tensor.bytes.append(reinterpret_cast<const char*>(&length), kLengthBytes);
    tensor.bytes.append(value);
  }
  if (absl::Status status = CheckTensor(tensor); !status.ok()) return status;
  return tensor;
}

absl::StatusOr<std::vector<std::string>> BytesValues(const Tensor& tensor) {
  if (tensor.datatype != "BYTES") return CheckDatatype(tensor, "BYTES");
  absl::StatusOr<int64_t> count = ElementCount(tensor.shape);
  if (!count.ok()) return count.status();
  std::vector<std::string> values;
  size_t offset = 0;
  while (offset < tensor.bytes.size()) {
    const int64_t length = ElementLength(tensor.bytes, offset);
    if (length < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(Describe(tensor), ": element ", values.size(), " is cut off"));
    }
    values.emplace_back(tensor.bytes, offset + kLengthBytes, length);
    offset += kLengthBytes + length;
  }
  if (static_cast<uint64_t>(*count) != values.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(Describe(tensor), ": expected ", *count, " elements, got ", values.size()));
  }
  return values;
}

}  // namespace espalier::client
