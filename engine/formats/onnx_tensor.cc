#include "engine/formats/onnx_tensor.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"

namespace espalier::formats {
namespace {

static_assert(std::endian::native == std::endian::little,
              "raw_data is little-endian and copied as it is");

absl::Status SizeError(absl::string_view where, absl::string_view unit, int64_t expected,
                       int64_t got) {
  return absl::InvalidArgumentError(
      absl::StrCat(where, " has ", got, " ", unit, ", expected ", expected));
}

absl::Span<const int64_t> Dims(const google::protobuf::RepeatedField<int64_t>& dims) {
  return {dims.data(), static_cast<size_t>(dims.size())};
}

// The fields of a TensorProto that can hold elements, with their names, in the order of OnnxStore;
// raw_data is apart.
struct TypedField {
  const char* name;
  int size;
};
constexpr int kTypedFields = 5;

std::array<TypedField, kTypedFields> TypedFields(const onnx::TensorProto& proto) {
  return {{{"float_data", proto.float_data_size()},
           {"int32_data", proto.int32_data_size()},
           {"int64_data", proto.int64_data_size()},
           {"double_data", proto.double_data_size()},
           {"uint64_data", proto.uint64_data_size()}}};
}

// Copies wide integers into narrower elements; a value that does not fit is an error, not a
// truncation.
template <typename Narrow, typename Wide>
absl::Status Narrowed(const google::protobuf::RepeatedField<Wide>& from, Narrow low, Narrow high,
                      void* to) {
  auto* out = static_cast<Narrow*>(to);
  for (int i = 0; i < from.size(); ++i) {
    if (from[i] < static_cast<Wide>(low) || from[i] > static_cast<Wide>(high)) {
      return absl::InvalidArgumentError(
          absl::StrCat("element ", i, " is ", from[i], ", expected ", +low, " to ", +high));
    }
    out[i] = static_cast<Narrow>(from[i]);
  }
  return absl::OkStatus();
}

template <typename Narrow, typename Wide>
absl::Status Narrowed(const google::protobuf::RepeatedField<Wide>& from, void* to) {
  return Narrowed<Narrow>(from, std::numeric_limits<Narrow>::min(),
                          std::numeric_limits<Narrow>::max(), to);
}

absl::Status CopyInt32Data(const onnx::TensorProto& proto, DType dtype, void* to) {
  const auto& from = proto.int32_data();
  switch (dtype) {
    case DType::kBool:
      return Narrowed<uint8_t>(from, 0, 1, to);
    case DType::kUint8:
      return Narrowed<uint8_t>(from, to);
    case DType::kInt8:
      return Narrowed<int8_t>(from, to);
    case DType::kInt16:
      return Narrowed<int16_t>(from, to);
    case DType::kUint16:
    case DType::kFloat16:  // the bit pattern
    case DType::kBFloat16:
      return Narrowed<uint16_t>(from, to);
    default:
      return Narrowed<int32_t>(from, to);
  }
}

absl::Status CopyTyped(const onnx::TensorProto& proto, const OnnxElementType& type, Tensor& to) {
  switch (type.store) {
    case OnnxStore::kFloat:
      std::copy(proto.float_data().begin(), proto.float_data().end(), to.As<float>());
      break;
    case OnnxStore::kInt64:
      std::copy(proto.int64_data().begin(), proto.int64_data().end(), to.As<int64_t>());
      break;
    case OnnxStore::kDouble:
      std::copy(proto.double_data().begin(), proto.double_data().end(), to.As<double>());
      break;
    case OnnxStore::kInt32:
      return CopyInt32Data(proto, type.dtype, to.data());
    case OnnxStore::kUint64:
      if (type.dtype == DType::kUint32) return Narrowed<uint32_t>(proto.uint64_data(), to.data());
      std::copy(proto.uint64_data().begin(), proto.uint64_data().end(), to.As<uint64_t>());
      break;
    case OnnxStore::kNone:
      break;
  }
  return absl::OkStatus();
}

// A C++ bool with another bit pattern than 0 or 1 is undefined behaviour, so that bytes of a file
// are looked at first.
absl::Status CheckBools(const Tensor& tensor) {
  if (tensor.dtype() != DType::kBool) return absl::OkStatus();
  const auto* bytes = tensor.As<uint8_t>();
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    if (bytes[i] > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("element ", i, " of BOOL is ", bytes[i], ", expected 0 or 1"));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadCount(absl::string_view key, const std::string& text, int64_t& value) {
  if (absl::SimpleAtoi(text, &value) && value >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("external data: ", key, " is ", Quoted(text), ", expected a count of bytes"));
}

// Values [count] and INT64 indices [count] or [count, rank].
absl::Status CheckSparseShapes(const onnx::SparseTensorProto& proto) {
  if (proto.dims_size() == 0) {
    return absl::InvalidArgumentError("a sparse tensor has no dimensions, expected at least one");
  }
  if (proto.values().dims_size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("values have ", proto.values().dims_size(), " dimensions, expected one"));
  }
  const int64_t count = proto.values().dims(0);
  const Shape linear = {count}, tuples = {count, proto.dims_size()};
  // Only the first dimensions are shown: there may be any number.
  const auto given = Dims(proto.indices().dims()).subspan(0, 3);
  if (given != absl::MakeConstSpan(linear) && given != absl::MakeConstSpan(tuples)) {
    return absl::InvalidArgumentError(absl::StrCat("indices have the shape ", ToString(given),
                                                   ", expected ", ToString(linear), " or ",
                                                   ToString(tuples)));
  }
  if (proto.indices().data_type() != onnx::TensorProto::INT64) {
    return absl::InvalidArgumentError(absl::StrCat(
        "indices have the element type ", proto.indices().data_type(), ", expected INT64 (7)"));
  }
  return absl::OkStatus();
}

// Row-major position of each entry of a sparse tensor, checked to be in range and ascending.
absl::StatusOr<std::vector<int64_t>> Positions(const Tensor& indices,
                                               absl::Span<const int64_t> dims, int64_t elements) {
  const int64_t count = indices.shape()[0];
  const size_t coordinates = indices.shape().size() == 2 ? dims.size() : 1;
  const int64_t* index = indices.As<int64_t>();
  std::vector<int64_t> positions(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    int64_t position = 0;
    for (size_t axis = 0; axis < coordinates; ++axis, ++index) {
      const int64_t end = coordinates == dims.size() ? dims[axis] : elements;
      if (*index < 0 || *index >= end) {
        return absl::InvalidArgumentError(absl::StrCat(
            "index ", i, " is ", *index, coordinates > 1 ? absl::StrCat(" on axis ", axis) : "",
            ", expected 0 to ", end - 1));
      }
      position = position * end + *index;
    }
    if (i > 0 && position <= positions[i - 1]) {
      return absl::InvalidArgumentError(absl::StrCat("index ", i, " is at position ", position,
                                                     " after ", positions[i - 1],
                                                     ", expected ascending without duplicates"));
    }
    positions[i] = position;
  }
  return positions;
}

template <typename T>
void Scatter(const Tensor& values, absl::Span<const int64_t> positions, Tensor& to) {
  for (size_t i = 0; i < positions.size(); ++i) to.As<T>()[positions[i]] = values.As<T>()[i];
}

}  // namespace

absl::StatusOr<ExternalRange> ExternalRangeOf(const onnx::TensorProto& proto) {
  ExternalRange range;
  std::vector<absl::string_view> seen;
  for (const auto& entry : proto.external_data()) {
    if (std::find(seen.begin(), seen.end(), entry.key()) != seen.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("external data: ", Quoted(entry.key()), " is given twice"));
    }
    // Keys beside these three ("checksum", keys of other runtimes) do not say where the elements
    // are.
    if (entry.key() == "location") {
      range.location = entry.value();
    } else if (entry.key() == "offset") {
      if (auto status = ReadCount("offset", entry.value(), range.offset); !status.ok())
        return status;
    } else if (entry.key() == "length") {
      if (auto status = ReadCount("length", entry.value(), range.length); !status.ok())
        return status;
    } else {
      continue;
    }
    seen.push_back(entry.key());
  }
  if (range.location.empty())
    return absl::InvalidArgumentError("external data: no location is given");
  return range;
}

absl::StatusOr<std::vector<int64_t>> OnnxSparsePositions(const onnx::SparseTensorProto& proto,
                                                         const Tensor& indices) {
  if (auto status = CheckSparseShapes(proto); !status.ok()) return status;
  const auto elements = CheckedElementCount(Dims(proto.dims()));
  if (!elements.ok()) return elements.status();
  return Positions(indices, Dims(proto.dims()), *elements);
}

absl::StatusOr<int64_t> CheckedElementCount(absl::Span<const int64_t> dims) {
  if (dims.size() > kMaxRank) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", dims.size(), " dimensions, expected at most ", kMaxRank));
  }
  return ElementCount(dims);
}

absl::Status OnnxConstants::Spend(int64_t bytes) {
  if (bytes > limits_.max_tensor_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "takes ", bytes, " bytes, the limit for one constant is ", limits_.max_tensor_bytes));
  }
  if (bytes > limits_.max_total_bytes - total_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat("takes ", bytes, " bytes after ", total_bytes_,
                                                     ", the limit for all constants is ",
                                                     limits_.max_total_bytes));
  }
  total_bytes_ += bytes;
  return absl::OkStatus();
}

absl::Status OnnxConstants::CheckExpansion(int64_t dense_bytes, int64_t stored_bytes) {
  // Both sums stay below 2^62: they are bounded by max_total_bytes and by what was read.
  const int64_t dense = expanded_bytes_ + dense_bytes;
  const int64_t stored = expanded_stored_bytes_ + stored_bytes;
  const int64_t beyond = std::max<int64_t>(dense - limits_.free_expanded_bytes, 0);
  if (beyond / limits_.max_expansion + (beyond % limits_.max_expansion > 0) > stored) {
    return absl::ResourceExhaustedError(
        absl::StrCat("sparse constants expand from ", stored, " to ", dense,
                     " bytes, the limit is ", limits_.free_expanded_bytes, " bytes plus ",
                     limits_.max_expansion, " times the bytes of their values"));
  }
  expanded_bytes_ = dense;
  expanded_stored_bytes_ = stored;
  return absl::OkStatus();
}

absl::StatusOr<Tensor> OnnxConstants::Dense(const onnx::TensorProto& proto) {
  if (proto.has_segment())
    return absl::UnimplementedError("tensors stored in segments are not supported");
  const auto type = OnnxElementTypeOf(proto.data_type());
  if (!type.ok()) return type.status();
  const auto elements = CheckedElementCount(Dims(proto.dims()));
  if (!elements.ok()) return elements.status();
  const int64_t size = static_cast<int64_t>(SizeOf(type->dtype));
  // Far above any limit, and far below an overflow of elements · size.
  if (*elements > (int64_t{1} << 58)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("has ", *elements, " elements, more than any limit allows"));
  }
  const bool external = proto.data_location() == onnx::TensorProto::EXTERNAL;
  if (!external && proto.external_data_size() > 0) {
    return absl::InvalidArgumentError("gives external data, but its data_location is not EXTERNAL");
  }
  auto tensor =
      external ? External(proto, type->dtype, *elements * size) : Stored(proto, *type, *elements);
  if (!tensor.ok()) return tensor;
  if (auto status = CheckBools(*tensor); !status.ok()) return status;
  return tensor;
}

absl::StatusOr<Tensor> OnnxConstants::Stored(const onnx::TensorProto& proto,
                                             const OnnxElementType& type, int64_t elements) {
  const auto fields = TypedFields(proto);
  const TypedField& own = fields[static_cast<size_t>(type.store) - 1];
  for (const TypedField& field : fields) {
    if (field.size > 0 && &field != &own) {
      return absl::InvalidArgumentError(absl::StrCat("stores ", field.name, ", expected ", own.name,
                                                     " or raw_data for ", type.name));
    }
  }
  if (proto.string_data_size() > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("stores string_data, expected ", own.name, " or raw_data for ", type.name));
  }
  const auto raw_bytes = static_cast<int64_t>(proto.raw_data().size());
  if (raw_bytes > 0 && own.size > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("stores both raw_data and ", own.name, ", expected one of them"));
  }
  const int64_t bytes = elements * static_cast<int64_t>(SizeOf(type.dtype));
  const std::string of_shape = absl::StrCat(" of ", type.name, " ", ToString(Dims(proto.dims())));
  if (own.size > 0 && own.size != elements)
    return SizeError(own.name + of_shape, "elements", elements, own.size);
  if (own.size == 0 && raw_bytes != bytes)
    return SizeError("raw_data" + of_shape, "bytes", bytes, raw_bytes);

  if (auto status = Spend(bytes); !status.ok()) return status;
  auto tensor = Tensor::Allocate(type.dtype, Dims(proto.dims()));
  if (!tensor.ok()) return tensor;
  if (own.size > 0) {
    if (auto status = CopyTyped(proto, type, *tensor); !status.ok()) return status;
  } else if (bytes > 0) {
    std::memcpy(tensor->data(), proto.raw_data().data(), static_cast<size_t>(bytes));
  }
  return tensor;
}

absl::StatusOr<Tensor> OnnxConstants::External(const onnx::TensorProto& proto, DType dtype,
                                               int64_t bytes) {
  for (const TypedField& field : TypedFields(proto)) {
    if (field.size == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat("stores both external data and ", field.name));
  }
  if (!proto.raw_data().empty())
    return absl::InvalidArgumentError("stores both external data and raw_data");
  const auto range = ExternalRangeOf(proto);
  if (!range.ok()) return range.status();
  const std::string where = absl::StrCat("external data ", Quoted(range->location));
  const auto annotated = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(where, ": ", status.message()));
  };
  if (auto status = OpenExternal(range->location); !status.ok()) return annotated(status);
  if (range->offset > external_size_) {
    return SizeError(where, "bytes", range->offset, external_size_);
  }
  const int64_t available = external_size_ - range->offset;
  const int64_t length = range->length < 0 ? available : range->length;
  if (length != bytes) {
    return SizeError(
        absl::StrCat(where, ", for ", NameOf(dtype), " ", ToString(Dims(proto.dims())), ","),
        "bytes", bytes, length);
  }
  if (length > available) {
    return SizeError(absl::StrCat(where, " after offset ", range->offset), "bytes", length,
                     available);
  }
  if (auto status = Spend(bytes); !status.ok()) return status;
  auto tensor = Tensor::Allocate(dtype, Dims(proto.dims()));
  if (!tensor.ok()) return tensor;
  if (auto status = ReadExternal(range->offset, tensor->data(), bytes); !status.ok())
    return annotated(status);
  return tensor;
}

absl::Status OnnxConstants::OpenExternal(const std::string& location) {
  const bool open = external_.has_value() || external_memory_ != nullptr;
  if (open && external_location_ == location) return absl::OkStatus();
  if (files_ != nullptr) {
    if (!IsPathBeneath(location))
      return absl::InvalidArgumentError("expected a path below the model's folder, without '..'");
    const auto found = files_->find(location.substr(location.rfind("./", 0) == 0 ? 2 : 0));
    if (found == files_->end())
      return absl::NotFoundError("is not among the files that came with the model");
    external_memory_ = &found->second;
    external_size_ = static_cast<int64_t>(found->second.size());
  } else {
    if (directory_.empty())
      return absl::InvalidArgumentError("the model was not read from a folder");
    auto file = RegularFile::OpenBeneath(directory_, location);
    if (!file.ok()) return file.status();
    external_ = *std::move(file);
    external_size_ = external_->size();
  }
  external_location_ = location;
  return absl::OkStatus();
}

absl::Status OnnxConstants::ReadExternal(int64_t offset, void* to, int64_t bytes) const {
  if (external_memory_ != nullptr) {
    std::memcpy(to, external_memory_->data() + offset, static_cast<size_t>(bytes));
    return absl::OkStatus();
  }
  if (auto status = external_->ReadAt(offset, to, bytes); !status.ok()) return status;
  return external_->CheckUnchanged();
}

absl::StatusOr<Tensor> OnnxConstants::Sparse(const onnx::SparseTensorProto& proto) {
  const auto dims = Dims(proto.dims());
  const auto elements = CheckedElementCount(dims);
  if (!elements.ok()) return elements.status();
  if (auto status = CheckSparseShapes(proto); !status.ok()) return status;
  const auto annotated = [](const char* part, const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(part, ": ", status.message()));
  };
  const auto values = Dense(proto.values());
  if (!values.ok()) return annotated("values", values.status());
  const auto indices = Dense(proto.indices());
  if (!indices.ok()) return annotated("indices", indices.status());
  const auto positions = Positions(*indices, dims, *elements);
  if (!positions.ok()) return annotated("indices", positions.status());

  const auto size = static_cast<int64_t>(SizeOf(values->dtype()));
  if (*elements > limits_.max_tensor_bytes / size) {
    return absl::ResourceExhaustedError(absl::StrCat("expands to ", *elements, " elements of ",
                                                     size, " bytes, the limit for one constant is ",
                                                     limits_.max_tensor_bytes, " bytes"));
  }
  if (auto status = Spend(*elements * size); !status.ok()) return status;
  if (auto status = CheckExpansion(*elements * size, static_cast<int64_t>(values->bytes()));
      !status.ok()) {
    return status;
  }
  auto tensor = Tensor::Allocate(values->dtype(), dims);
  if (!tensor.ok()) return tensor;
  if (tensor->bytes() > 0) std::memset(tensor->data(), 0, tensor->bytes());
  switch (size) {
    case 1:
      Scatter<uint8_t>(*values, *positions, *tensor);
      break;
    case 2:
      Scatter<uint16_t>(*values, *positions, *tensor);
      break;
    case 4:
      Scatter<uint32_t>(*values, *positions, *tensor);
      break;
    default:
      Scatter<uint64_t>(*values, *positions, *tensor);
      break;
  }
  return tensor;
}

}  // namespace espalier::formats
