#include <onnx/onnx_pb.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/formats/names.h"
#include "engine/formats/onnx_architecture.h"
#include "engine/formats/onnx_model.h"
#include "engine/formats/onnx_tensor.h"
#include "engine/formats/onnx_types.h"
#include "engine/formats/weight_layout.h"

namespace espalier::formats {
namespace {

using onnx::TensorProto;

// Field numbers of onnx.proto that lead to weights.
constexpr int kModelGraph = 7, kGraphInitializer = 5, kGraphSparseInitializer = 15;
constexpr int kTensorFloatData = 4, kTensorInt64Data = 7, kTensorRawData = 9,
              kTensorDoubleData = 10;
constexpr int kSparseValues = 1, kSparseIndices = 2;

constexpr absl::string_view kModelName = "model.onnx";

struct Field {
  int number;
  absl::string_view payload;  // of a length-delimited field; empty for others
};

// The fields of a message that has been parsed already, so that it is well-formed.
class Fields {
 public:
  explicit Fields(absl::string_view wire) : wire_(wire) {}
  bool Next(Field& field) {
    if (wire_.empty()) return false;
    const uint64_t tag = Varint();
    field = {static_cast<int>(tag >> 3), {}};
    switch (tag & 7) {
      case 0:
        Varint();
        break;
      case 1:
        Skip(8);
        break;
      case 2: {
        const uint64_t size = Varint();
        field.payload = wire_.substr(0, size);
        Skip(size);
        break;
      }
      default:
        Skip(4);
    }
    return true;
  }

 private:
  uint64_t Varint() {
    uint64_t value = 0;
    for (int shift = 0; !wire_.empty(); shift += 7) {
      const auto byte = static_cast<uint8_t>(wire_[0]);
      wire_.remove_prefix(1);
      value |= static_cast<uint64_t>(byte & 0x7f) << std::min(shift, 63);
      if (byte < 0x80) break;
    }
    return value;
  }
  void Skip(uint64_t bytes) { wire_.remove_prefix(std::min<uint64_t>(bytes, wire_.size())); }

  absl::string_view wire_;
};

// The only field with this number; empty when there is none or more than one.
absl::string_view Only(absl::string_view message, int number) {
  Fields fields(message);
  absl::string_view found;
  int count = 0;
  for (Field field; fields.Next(field);) {
    if (field.number != number) continue;
    found = field.payload;
    ++count;
  }
  return count == 1 ? found : absl::string_view();
}

// In the order in which the parser appends them, over all occurrences of the graph.
std::vector<absl::string_view> All(absl::string_view model, int graph_field) {
  std::vector<absl::string_view> found;
  Fields fields(model);
  for (Field field; fields.Next(field);) {
    if (field.number != kModelGraph) continue;
    Fields of_graph(field.payload);
    for (Field inner; of_graph.Next(inner);) {
      if (inner.number == graph_field) found.push_back(inner.payload);
    }
  }
  return found;
}

// The name that safetensors has for an ONNX type; empty for what has no elements here.
std::string DtypeOf(int32_t data_type) {
  const auto type = OnnxElementTypeOf(data_type);
  if (!type.ok()) return "";
  switch (type->dtype) {
    case DType::kBool:
      return "BOOL";
    case DType::kBFloat16:
      return "BF16";
    case DType::kFloat16:
      return "F16";
    case DType::kFloat32:
      return "F32";
    case DType::kFloat64:
      return "F64";
    case DType::kUint8:
      return "U8";
    case DType::kUint16:
      return "U16";
    case DType::kUint32:
      return "U32";
    case DType::kUint64:
      return "U64";
    case DType::kInt8:
      return "I8";
    case DType::kInt16:
      return "I16";
    case DType::kInt32:
      return "I32";
    case DType::kInt64:
      return "I64";
    case DType::kBytes:
      break;
  }
  return "";
}

template <typename Dims>
absl::StatusOr<int64_t> BytesOf(const Dims& dims, int32_t data_type) {
  const auto elements = CheckedElementCount({dims.data(), static_cast<size_t>(dims.size())});
  if (!elements.ok()) return elements.status();
  if (*elements > (int64_t{1} << 43))
    return absl::ResourceExhaustedError("has more elements than any limit allows");
  return *elements * static_cast<int64_t>(SizeOf(OnnxElementTypeOf(data_type)->dtype));
}

class OnnxLayoutReader {
 public:
  OnnxLayoutReader(const std::string& path, absl::string_view bytes)
      : bytes_(bytes), constants_("", {}) {
    const size_t slash = path.rfind('/');
    directory_ = slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
  }

  absl::StatusOr<WeightLayout> Read(std::shared_ptr<const RegularFile> file,
                                    const onnx::ModelProto& model) {
    layout_.files.push_back({std::string(kModelName), {}, std::move(file)});
    const auto dense = All(bytes_, kGraphInitializer);
    const auto sparse = All(bytes_, kGraphSparseInitializer);
    for (int i = 0; i < model.graph().initializer_size(); ++i) {
      auto status = AddDense(model.graph().initializer(i), dense[static_cast<size_t>(i)]);
      if (!status.ok()) return InTensor(model.graph().initializer(i).name(), status);
    }
    for (int i = 0; i < model.graph().sparse_initializer_size(); ++i) {
      const auto& proto = model.graph().sparse_initializer(i);
      auto status = AddSparse(proto, sparse[static_cast<size_t>(i)]);
      if (!status.ok()) return InTensor(proto.values().name(), status);
    }
    const OnnxArchitecture architecture = ArchitectureOf(model);
    layout_.architecture = architecture.Serialize();
    layout_.uses = architecture.uses;
    if (auto status = Sort(); !status.ok()) return status;
    return std::move(layout_);
  }

 private:
  static absl::Status InTensor(const std::string& name, const absl::Status& status) {
    return absl::Status(status.code(),
                        absl::StrCat("initializer ", Quoted(name), ": ", status.message()));
  }

  uint64_t OffsetOf(absl::string_view payload) const {
    return static_cast<uint64_t>(payload.data() - bytes_.data());
  }

  // The one run of bytes that holds the elements of a dense tensor; empty when there is none.
  static absl::string_view ElementsOf(const TensorProto& proto, absl::string_view wire) {
    if (proto.has_raw_data()) return Only(wire, kTensorRawData);
    // Packed floats are their bytes; other typed fields are varints.
    if (proto.data_type() == TensorProto::FLOAT) return Only(wire, kTensorFloatData);
    if (proto.data_type() == TensorProto::DOUBLE) return Only(wire, kTensorDoubleData);
    return {};
  }

  absl::Status AddDense(const TensorProto& proto, absl::string_view wire) {
    LaidOutTensor tensor;
    tensor.name = proto.name();
    tensor.dtype = DtypeOf(proto.data_type());
    if (tensor.dtype.empty() || proto.has_segment()) return absl::OkStatus();
    if (auto status = CheckName("an initializer", proto.name()); !status.ok()) return status;
    tensor.dims.assign(proto.dims().begin(), proto.dims().end());
    const auto bytes = BytesOf(proto.dims(), proto.data_type());
    if (!bytes.ok()) return bytes.status();
    tensor.bytes = *bytes;
    if (proto.data_location() == TensorProto::EXTERNAL) {
      if (auto status = AddExternal(proto, tensor); !status.ok()) return status;
    } else {
      const absl::string_view elements = ElementsOf(proto, wire);
      if (tensor.bytes > 0 && elements.empty()) return absl::OkStatus();  // typed: rest
      if (static_cast<int64_t>(elements.size()) != tensor.bytes) {
        return absl::InvalidArgumentError(
            absl::StrCat("stores ", elements.size(), " bytes, expected ", tensor.bytes));
      }
      tensor.offset = tensor.bytes > 0 ? OffsetOf(elements) : 0;
    }
    AddHole(tensor.file, HoleContent::kElements, tensor.offset,
            static_cast<uint64_t>(tensor.bytes));
    layout_.tensors.push_back(std::move(tensor));
    return absl::OkStatus();
  }

  absl::Status AddExternal(const TensorProto& proto, LaidOutTensor& tensor) {
    auto range = ExternalRangeOf(proto);
    if (!range.ok()) return range.status();
    const absl::string_view name = absl::StripPrefix(range->location, "./");
    if (!IsPathBeneath(name) || absl::StrContains(name, '/') || name == kModelName) {
      return absl::UnimplementedError(
          absl::StrCat("external data in ", Quoted(name),
                       ", expected a name in the model's folder other than ", kModelName));
    }
    tensor.file = FileNamed(std::string(name));
    if (tensor.file == 0) {
      auto file = RegularFile::OpenBeneath(directory_, std::string(name));
      if (!file.ok()) return file.status();
      layout_.files.push_back(
          {std::string(name), {}, std::make_shared<const RegularFile>(*std::move(file))});
      tensor.file = layout_.files.size() - 1;
    }
    const int64_t size = layout_.files[tensor.file].file->size();
    const int64_t length = range->length >= 0 ? range->length : size - range->offset;
    if (length != tensor.bytes || range->offset > size || length > size - range->offset) {
      return absl::InvalidArgumentError(absl::StrCat("external data of ", length, " bytes at ",
                                                     range->offset, " of ", size, ", expected ",
                                                     tensor.bytes));
    }
    tensor.offset = static_cast<uint64_t>(range->offset);
    return absl::OkStatus();
  }

  // 0, the model itself, when there is none yet.
  size_t FileNamed(const std::string& name) const {
    for (size_t i = 1; i < layout_.files.size(); ++i) {
      if (layout_.files[i].name == name) return i;
    }
    return 0;
  }

  void AddHole(size_t file, HoleContent content, uint64_t offset, uint64_t bytes) {
    if (bytes > 0)
      layout_.files[file].holes.push_back({layout_.tensors.size(), content, offset, bytes});
  }

  absl::Status AddSparse(const onnx::SparseTensorProto& proto, absl::string_view wire) {
    LaidOutTensor tensor;
    tensor.name = proto.values().name();
    tensor.dtype = DtypeOf(proto.values().data_type());
    if (tensor.dtype.empty()) return absl::OkStatus();
    if (auto status = CheckName("a sparse initializer", tensor.name); !status.ok()) return status;
    tensor.dims.assign(proto.dims().begin(), proto.dims().end());
    tensor.sparse = true;
    const auto bytes = BytesOf(proto.dims(), proto.values().data_type());
    if (!bytes.ok()) return bytes.status();
    tensor.bytes = *bytes;
    const auto values = constants_.Dense(proto.values());
    if (!values.ok()) return values.status();
    const auto indices = constants_.Dense(proto.indices());
    if (!indices.ok()) return indices.status();
    auto positions = OnnxSparsePositions(proto, *indices);
    if (!positions.ok()) return positions.status();
    tensor.positions = *std::move(positions);
    tensor.values.assign(static_cast<const char*>(values->data()), values->bytes());
    if (auto status = CheckExpansion(tensor); !status.ok()) return status;
    AddSparseHoles(proto, wire, tensor, *values);
    layout_.tensors.push_back(std::move(tensor));
    return absl::OkStatus();
  }

  // As for a model that is served (ReadLimits): zeros cost nothing here, but time to walk and digest.
  absl::Status CheckExpansion(const LaidOutTensor& tensor) {
    const ReadLimits limits;
    expanded_bytes_ += tensor.bytes;
    stored_bytes_ += static_cast<int64_t>(tensor.values.size());
    const bool too_much =
        tensor.bytes > limits.max_tensor_bytes || expanded_bytes_ > limits.max_total_bytes ||
        (expanded_bytes_ - limits.free_expanded_bytes) / limits.max_expansion > stored_bytes_;
    if (!too_much) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        absl::StrCat("expands to ", tensor.bytes, " bytes, sparse ones together from ",
                     stored_bytes_, " to ", expanded_bytes_, ": more than the limits allow"));
  }

  // Both holes, or none: bytes that do not follow from the elements are rest.
  void AddSparseHoles(const onnx::SparseTensorProto& proto, absl::string_view wire,
                      const LaidOutTensor& tensor, const Tensor& values) {
    if (HasZero(values) || tensor.positions.empty()) return;
    const absl::string_view value_bytes = ElementsOf(proto.values(), Only(wire, kSparseValues));
    if (value_bytes.size() != tensor.values.size() ||
        std::memcmp(value_bytes.data(), tensor.values.data(), value_bytes.size()) != 0) {
      return;
    }
    const bool tuples = proto.indices().dims_size() == 2;
    const absl::string_view indices = Only(wire, kSparseIndices);
    const bool raw = proto.indices().has_raw_data();
    const absl::string_view index_bytes = Only(indices, raw ? kTensorRawData : kTensorInt64Data);
    if (index_bytes.empty() || (!raw && !IsShortest(index_bytes, proto.indices()))) return;
    AddHole(0, HoleContent::kNonzeros, OffsetOf(value_bytes), value_bytes.size());
    const HoleContent content =
        raw ? (tuples ? HoleContent::kTupleIndices : HoleContent::kLinearIndices)
            : (tuples ? HoleContent::kTupleVarints : HoleContent::kLinearVarints);
    AddHole(0, content, OffsetOf(index_bytes), index_bytes.size());
  }

  static bool HasZero(const Tensor& values) {
    const auto any = [&](const auto* elements, auto mask) {
      return std::any_of(elements, elements + values.elements(),
                         [&](auto bits) { return (bits & mask) == 0; });
    };
    const bool is_float = values.dtype() == DType::kFloat32 || values.dtype() == DType::kFloat16 ||
                          values.dtype() == DType::kBFloat16;
    // Elements of other dtypes are bytes to the codec, and an element is not a byte.
    if (!is_float) return true;
    return values.dtype() == DType::kFloat32 ? any(values.As<uint32_t>(), 0x7fffffffu)
                                             : any(values.As<uint16_t>(), uint16_t{0x7fff});
  }

  // Packed varints of the shortest form: what writing the numbers again gives.
  static bool IsShortest(absl::string_view bytes, const TensorProto& indices) {
    size_t expected = 0;
    for (const int64_t index : indices.int64_data()) {
      expected += 1;
      for (auto rest = static_cast<uint64_t>(index) >> 7; rest != 0; rest >>= 7) ++expected;
    }
    return expected == bytes.size();
  }

  absl::Status Sort() {
    std::vector<size_t> order(layout_.tensors.size()), place(layout_.tensors.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return layout_.tensors[a].name < layout_.tensors[b].name;
    });
    std::vector<LaidOutTensor> sorted;
    for (size_t i = 0; i < order.size(); ++i) {
      place[order[i]] = i;
      sorted.push_back(std::move(layout_.tensors[order[i]]));
      if (i > 0 && sorted[i - 1].name == sorted[i].name)
        return absl::InvalidArgumentError(
            absl::StrCat("the initializer ", Quoted(sorted[i].name), " is there twice"));
    }
    layout_.tensors = std::move(sorted);
    for (LaidOutFile& file : layout_.files) {
      std::sort(file.holes.begin(), file.holes.end(),
                [](const WeightHole& a, const WeightHole& b) { return a.offset < b.offset; });
      uint64_t end = 0;
      for (WeightHole& hole : file.holes) {
        hole.tensor = place[hole.tensor];
        if (hole.offset < end) {
          return absl::InvalidArgumentError(absl::StrCat("tensor ",
                                                         Quoted(layout_.tensors[hole.tensor].name),
                                                         " shares external data with another one"));
        }
        end = hole.offset + hole.bytes;
      }
    }
    return SortFiles();
  }

  absl::Status SortFiles() {
    std::vector<size_t> order(layout_.files.size()), place(layout_.files.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return layout_.files[a].name < layout_.files[b].name; });
    std::vector<LaidOutFile> sorted;
    for (size_t i = 0; i < order.size(); ++i) {
      place[order[i]] = i;
      sorted.push_back(std::move(layout_.files[order[i]]));
    }
    layout_.files = std::move(sorted);
    for (LaidOutTensor& tensor : layout_.tensors) tensor.file = place[tensor.file];
    return absl::OkStatus();
  }

  absl::string_view bytes_;
  std::string directory_;
  OnnxConstants constants_;
  int64_t expanded_bytes_ = 0, stored_bytes_ = 0;  // of sparse initializers
  WeightLayout layout_;
};

struct LoadedOnnx {
  std::shared_ptr<const RegularFile> file;
  Buffer bytes;
  std::unique_ptr<onnx::ModelProto> model;
};

absl::Status InFile(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat(Shown(path, kShownPathBytes), ": ", status.message()));
}

absl::StatusOr<LoadedOnnx> Load(const std::string& path) {
  auto file = RegularFile::Open(path);
  if (!file.ok()) return file.status();
  LoadedOnnx loaded;
  loaded.file = std::make_shared<const RegularFile>(*std::move(file));
  const ReadLimits limits;
  auto bytes = loaded.file->ReadAll(limits.max_file_bytes);
  if (!bytes.ok()) return bytes.status();
  loaded.bytes = *std::move(bytes);
  auto model = ParseOnnxModel(
      {reinterpret_cast<const char*>(loaded.bytes.data()), loaded.bytes.size()}, limits);
  if (!model.ok()) return InFile(path, model.status());
  if (!(*model)->has_graph()) return InFile(path, absl::InvalidArgumentError("has no graph"));
  loaded.model = *std::move(model);
  return loaded;
}

}  // namespace

absl::StatusOr<WeightLayout> ReadOnnxLayout(const std::string& path) {
  auto loaded = Load(path);
  if (!loaded.ok()) return loaded.status();
  OnnxLayoutReader reader(
      path, {reinterpret_cast<const char*>(loaded->bytes.data()), loaded->bytes.size()});
  auto layout = reader.Read(loaded->file, *loaded->model);
  if (!layout.ok()) return InFile(path, layout.status());
  return layout;
}

absl::StatusOr<std::string> OnnxDifference(const std::string& old_path,
                                           const std::string& new_path) {
  const auto was = Load(old_path);
  if (!was.ok()) return was.status();
  const auto is = Load(new_path);
  if (!is.ok()) return is.status();
  return Difference(ArchitectureOf(*was->model), ArchitectureOf(*is->model));
}

}  // namespace espalier::formats
