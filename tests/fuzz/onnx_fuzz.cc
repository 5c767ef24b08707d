// Any bytes at all, read as an ONNX model: refused with a message that fits into a response, or a graph that keeps
// every promise of model_graph.h.
#include <onnx/onnx_pb.h>

#include <algorithm>
#include <set>

#include "engine/formats/names.h"
#include "engine/formats/onnx_reader.h"
#include "tests/engine/formats/onnx_builder.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/proto_mutator.h"

namespace espalier::fuzz {
namespace {

using espalier::testing::AddAttribute;
using espalier::testing::AddNode;
using espalier::testing::MakeRaw;
using espalier::testing::MakeSparse;
using espalier::testing::MakeTensor;
using espalier::testing::SetExternal;
using espalier::testing::SmallModel;
using formats::ModelGraph;
using onnx::AttributeProto;
using onnx::ModelProto;
using onnx::TensorProto;

// Small enough that an input which gets around a limit is seen at once as memory.
formats::ReadLimits Limits() {
  formats::ReadLimits limits;
  limits.max_file_bytes = 1 << 20;
  limits.max_parsed_bytes = 64 << 20;
  limits.max_tensor_bytes = 1 << 20;
  limits.max_total_bytes = 4 << 20;
  limits.max_nodes = 1000;
  limits.free_expanded_bytes = 1 << 20;
  limits.max_expansion = 100;
  return limits;
}

// Folder with the files that models of the seeds refer to.
const std::string& Folder() {
  static const espalier::testing::TemporaryFolder folder;
  static const bool written = !folder.Write("w.bin", std::string(64, '\x3f')).empty();
  Require(written, "the folder for external data can be written");
  return folder.path();
}

void CheckRefusal(const absl::Status& status) {
  const std::string message(status.message());
  Require(message.rfind("fuzz.onnx: ", 0) == 0, "an error names the file", message);
  Require(formats::IsUtf8(message), "an error is UTF-8", message);
  Require(message.size() < 4096, "an error is short", message);
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kNotFound:
      return;
    default:
      Require(status.code() == absl::StatusCode::kFailedPrecondition,
              "the code of an error is a listed one", status.ToString());
  }
}

void CheckValue(const formats::ValueInfo& value) {
  Require(formats::CheckName("a value", value.name).ok(), "names of values are good", value.name);
  for (size_t i = 0; i < value.shape.size(); ++i) {
    Require(value.shape[i] > 0 || (i == 0 && value.shape[i] == kBatch),
            "dimensions are positive or the batch");
  }
}

void CheckTensor(const Tensor& tensor) {
  const auto elements = ElementCount(tensor.shape());
  Require(elements.ok() && *elements == tensor.elements(), "a constant has the size of its shape");
  const auto* bytes = static_cast<const uint8_t*>(tensor.data());
  unsigned sum = 0;  // reads every byte, for the sanitizer
  for (size_t i = 0; i < tensor.bytes(); ++i) {
    Require(tensor.dtype() != DType::kBool || bytes[i] < 2, "a BOOL is 0 or 1");
    sum += bytes[i];
  }
  volatile unsigned sink = sum;
  (void)sink;
}

void CheckGraph(const ModelGraph& graph) {
  std::set<std::string> known, names;
  for (const auto& input : graph.inputs) {
    CheckValue(input);
    Require(known.insert(input.name).second, "inputs are unique", input.name);
  }
  for (const auto& [name, tensor] : graph.initializers) {
    CheckTensor(tensor);
    Require(known.insert(name).second, "constants are unique", name);
  }
  for (const auto& node : graph.nodes) {
    Require(formats::CheckName("a node", node.name).ok(), "names of nodes are good", node.name);
    Require(names.insert(node.name).second, "names of nodes are unique", node.name);
    Require(node.domain.empty(), "nodes are of ai.onnx", node.domain);
    for (const auto& input : node.inputs) {
      Require(input.empty() || known.count(input) > 0, "inputs are produced before they are read",
              input);
    }
    for (const auto& output : node.outputs) {
      Require(output.empty() || known.insert(output).second, "values are produced once", output);
    }
    for (const auto& [name, attribute] : node.attributes) {
      if (const auto* tensor = std::get_if<Tensor>(&attribute)) CheckTensor(*tensor);
    }
  }
  Require(!graph.outputs.empty(), "there is an output");
  for (const auto& output : graph.outputs) {
    CheckValue(output);
    Require(known.count(output.name) > 0, "outputs are produced", output.name);
  }
}

ModelProto WithTypedTensors() {
  ModelProto model = SmallModel();
  const auto add = [&](int type, auto&& fill) {
    auto& tensor = *model.mutable_graph()->add_initializer() =
        MakeTensor("t" + std::to_string(model.graph().initializer_size()), type, {2});
    fill(tensor);
    fill(tensor);
  };
  for (int type : {TensorProto::INT32, TensorProto::INT8, TensorProto::UINT16, TensorProto::BOOL,
                   TensorProto::FLOAT16, TensorProto::BFLOAT16}) {
    add(type, [](TensorProto& tensor) { tensor.add_int32_data(1); });
  }
  add(TensorProto::INT64, [](TensorProto& tensor) { tensor.add_int64_data(1); });
  add(TensorProto::UINT32, [](TensorProto& tensor) { tensor.add_uint64_data(1); });
  add(TensorProto::DOUBLE, [](TensorProto& tensor) { tensor.add_double_data(1); });
  return model;
}

ModelProto WithConstants() {
  ModelProto model = SmallModel();
  const auto add = [&](const std::string& name,
                       AttributeProto::AttributeType type) -> AttributeProto& {
    return *AddAttribute(*AddNode(model, "", "Constant", {}, {name}), name, type);
  };
  *add("value", AttributeProto::TENSOR).mutable_t() =
      MakeRaw<float>("", TensorProto::FLOAT, {2}, {1, 2});
  *add("sparse_value", AttributeProto::SPARSE_TENSOR).mutable_sparse_tensor() =
      MakeSparse("", {3}, {5}, {1}, {1});
  add("value_float", AttributeProto::FLOAT).set_f(1);
  add("value_ints", AttributeProto::INTS).add_ints(1);
  AddNode(model, "", "Concat", {"value", "value_float", "", "value_ints"}, {"c"});
  AddNode(model, "", "Add", {"c", "sparse_value"}, {"z", ""});
  return model;
}

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<ModelProto> models = {SmallModel(), WithTypedTensors(), WithConstants()};
  for (const auto& sparse : {MakeSparse("w", {2, 3}, {1, 2, 3}, {3}, {0, 2, 4}),
                             MakeSparse("w", {2, 3}, {1, 2, 3}, {3, 2}, {0, 0, 0, 2, 1, 1})}) {
    auto& model = models.emplace_back(SmallModel());
    model.mutable_graph()->mutable_initializer()->DeleteSubrange(0, 1);
    *model.mutable_graph()->add_sparse_initializer() = sparse;
  }
  auto& external = models.emplace_back(SmallModel());
  SetExternal(*external.mutable_graph()->mutable_initializer(0),
              {{"location", "w.bin"}, {"offset", "8"}, {"length", "24"}});
  std::vector<std::string> seeds;
  for (const auto& model : models) seeds.push_back(model.SerializeAsString());
  return seeds;
}

std::string MutateStructure(const std::string& input, std::mt19937_64& random) {
  static const std::vector<std::string> kWords = {"x",
                                                  "y",
                                                  "w",
                                                  "b",
                                                  "h",
                                                  "",
                                                  "Gemm",
                                                  "Relu",
                                                  "Constant",
                                                  "value",
                                                  "c",
                                                  "ai.onnx",
                                                  "N",
                                                  "w.bin",
                                                  "offset",
                                                  "length",
                                                  "8",
                                                  "24",
                                                  "-1",
                                                  "location",
                                                  "../w",
                                                  "./w.bin",
                                                  "fc",
                                                  "relu",
                                                  "t3",
                                                  "value_int",
                                                  "value_floats",
                                                  "sparse_value",
                                                  "\xff",
                                                  "\n"};
  ModelProto model;
  if (!model.ParseFromString(input)) return input;
  // Almost all that can go wrong is in the graph; a changed version ends the reading before it.
  for (uint64_t changes = 1 + random() % 2; changes > 0; --changes) {
    auto& target =
        random() % 16 > 0 ? static_cast<google::protobuf::Message&>(*model.mutable_graph()) : model;
    MutateMessage(target, kWords, random);
  }
  return model.SerializeAsString();
}

}  // namespace espalier::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace espalier;  // NOLINT(google-build-using-namespace): an extern "C" function
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  formats::LooksLikeOnnx(bytes.substr(0, 64));
  const auto graph = formats::ReadOnnxBytes(bytes, "fuzz.onnx", fuzz::Folder(), fuzz::Limits());
  if (graph.ok()) {
    fuzz::CheckGraph(*graph);
  } else {
    fuzz::CheckRefusal(graph.status());
  }
  return 0;
}
