#include "engine/formats/onnx_reader.h"

#include <google/protobuf/io/coded_stream.h>
#include <onnx/onnx_pb.h>

#include <algorithm>
#include <climits>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"
#include "engine/formats/onnx_graph.h"
#include "engine/formats/onnx_model.h"
#include "engine/formats/onnx_tensor.h"
#include "engine/formats/onnx_wire.h"

namespace espalier::formats {
namespace {

// IR 3 brought opset imports, without which ops have no definition. IR 13 and opset 27 (both of
// onnx 1.22) are the newest whose changes were read for this; a newer opset may give an op another
// meaning, so that it is not guessed at.
constexpr int64_t kMinIrVersion = 3, kMaxIrVersion = 13;
constexpr int64_t kMinOpset = 7, kMaxOpset = 27;

// Parsed objects may take this much plus so many times the file: a plain node takes 8 times its
// bytes on the wire, a list of small integers 8 times, weights 1 time. Files of empty messages take
// 100 times and stop here.
constexpr int64_t kFreeParsedBytes = int64_t{64} << 20;
constexpr int64_t kMaxParseExpansion = 16;

using ModelPtr = std::unique_ptr<onnx::ModelProto>;

// Version of ai.onnx that the model imports.
absl::StatusOr<int64_t> OpsetOf(const onnx::ModelProto& model) {
  std::optional<int64_t> opset;
  for (const auto& import : model.opset_import()) {
    if (!IsOnnxDomain(import.domain())) continue;  // harmless unless a node uses it
    if (opset) return absl::InvalidArgumentError("imports the opset of ai.onnx twice");
    opset = import.version();
  }
  if (!opset) return absl::InvalidArgumentError("imports no opset of ai.onnx");
  if (*opset < kMinOpset || *opset > kMaxOpset) {
    return absl::UnimplementedError(absl::StrCat("imports opset ", *opset,
                                                 " of ai.onnx, supported are ", kMinOpset, " to ",
                                                 kMaxOpset, ": export the model with one of them"));
  }
  return *opset;
}

absl::StatusOr<ModelGraph> Build(ModelPtr model, const std::string& source,
                                 const std::string& directory, const ReadLimits& limits,
                                 const FilesInMemory* files = nullptr) {
  if (model->ir_version() < kMinIrVersion || model->ir_version() > kMaxIrVersion) {
    const std::string message =
        absl::StrCat("has the ONNX IR version ", model->ir_version(), ", supported are ",
                     kMinIrVersion, " to ", kMaxIrVersion);
    return model->ir_version() <= 0 ? absl::InvalidArgumentError(message)
                                    : absl::UnimplementedError(message);
  }
  if (!model->has_graph()) return absl::InvalidArgumentError("has no graph");
  if (model->functions_size() > 0) {
    return absl::UnimplementedError(absl::StrCat("defines the model-local function ",
                                                 Quoted(model->functions(0).name()),
                                                 ": inline functions before the export"));
  }
  ModelGraph graph;
  graph.source = source;
  const auto opset = OpsetOf(*model);
  if (!opset.ok()) return opset.status();
  graph.opset = *opset;
  OnnxConstants constants(directory, limits, files);
  if (auto status = ReadOnnxGraph(*model->mutable_graph(), constants, limits, graph); !status.ok())
    return status;
  if (auto status = FinishGraph(graph); !status.ok()) return status;
  return graph;
}

absl::Status Annotated(const std::string& source, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(source, ": ", status.message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<onnx::ModelProto>> ParseOnnxModel(absl::string_view bytes,
                                                                 const ReadLimits& limits) {
  const auto size = static_cast<int64_t>(bytes.size());
  const int64_t max_file_bytes = std::min<int64_t>(limits.max_file_bytes, INT_MAX);
  if (size > max_file_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("has ", size, " bytes, the limit is ", max_file_bytes));
  }
  const int64_t max_parsed_bytes =
      std::min(limits.max_parsed_bytes, kFreeParsedBytes + kMaxParseExpansion * size);
  const auto parsed_bytes = ParsedBytes(bytes, *onnx::ModelProto::descriptor(), max_parsed_bytes);
  if (!parsed_bytes.ok()) return parsed_bytes.status();
  auto model = std::make_unique<onnx::ModelProto>();
  google::protobuf::io::CodedInputStream stream(reinterpret_cast<const uint8_t*>(bytes.data()),
                                                static_cast<int>(size));
  stream.SetTotalBytesLimit(static_cast<int>(size));
  stream.SetRecursionLimit(kMaxOnnxNesting);
  if (!model->ParseFromCodedStream(&stream) || !stream.ConsumedEntireMessage()) {
    return absl::InvalidArgumentError("malformed: not a protobuf message");
  }
  return model;
}

bool LooksLikeOnnx(absl::string_view head) {
  google::protobuf::io::CodedInputStream stream(reinterpret_cast<const uint8_t*>(head.data()),
                                                static_cast<int>(head.size()));
  const uint32_t tag = stream.ReadTag();
  const auto* field = onnx::ModelProto::descriptor()->FindFieldByNumber(static_cast<int>(tag >> 3));
  if (field == nullptr) return false;
  const uint32_t wire_type =
      field->cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_INT64 ? 0 : 2;
  return (tag & 7) == wire_type;
}

absl::StatusOr<ModelGraph> ReadOnnx(const RegularFile& file, const ReadLimits& limits) {
  const std::string& path = file.path();
  const size_t slash = path.rfind('/');
  const std::string directory = slash == std::string::npos ? "."
                                : slash == 0               ? "/"
                                                           : path.substr(0, slash);
  ModelPtr model;
  {  // the file's bytes are gone before constants are decoded
    const auto bytes = file.ReadAll(limits.max_file_bytes);
    if (!bytes.ok()) return bytes.status();
    auto parsed =
        ParseOnnxModel({reinterpret_cast<const char*>(bytes->data()), bytes->size()}, limits);
    if (!parsed.ok()) return Annotated(path, parsed.status());
    model = *std::move(parsed);
  }
  auto graph = Build(std::move(model), path, directory, limits);
  return graph.ok() ? std::move(graph) : Annotated(path, graph.status());
}

absl::StatusOr<ModelGraph> ReadOnnxBytes(absl::string_view bytes, const std::string& source,
                                         const std::string& directory, const ReadLimits& limits) {
  auto model = ParseOnnxModel(bytes, limits);
  if (!model.ok()) return Annotated(source, model.status());
  auto graph = Build(*std::move(model), source, directory, limits);
  return graph.ok() ? std::move(graph) : Annotated(source, graph.status());
}

absl::StatusOr<ModelGraph> ReadOnnxInMemory(absl::string_view bytes, const std::string& source,
                                            const FilesInMemory& files, const ReadLimits& limits) {
  auto model = ParseOnnxModel(bytes, limits);
  if (!model.ok()) return Annotated(source, model.status());
  auto graph = Build(*std::move(model), source, "", limits, &files);
  return graph.ok() ? std::move(graph) : Annotated(source, graph.status());
}

}  // namespace espalier::formats
