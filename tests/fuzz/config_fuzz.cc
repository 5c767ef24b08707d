// Any text at all, read as config.pbtxt and completed from a model: refused with a message that fits into a response,
// or a config that says of the model what it is.
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include "engine/formats/model_config.h"
#include "engine/formats/model_settings.h"
#include "engine/formats/names.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/proto_mutator.h"

namespace espalier::fuzz {
namespace {

using inference::ModelConfig;

formats::ModelGraph Graph() {
  formats::ModelGraph graph;
  graph.inputs = {{"x", DType::kFloat32, {kBatch, 3}}, {"mask", DType::kInt64, {kBatch, 2, 2}}};
  graph.outputs = {{"y", DType::kFloat32, {kBatch, 10}}};
  return graph;
}

void CheckRefusal(const absl::Status& status) {
  const std::string message(status.message());
  Require(message.size() > 8, "an error has a message", message);
  Require(message.size() < 4096, "an error is short", message);
  Require(formats::IsUtf8(message), "an error is UTF-8", message);
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kResourceExhausted:
      return;
    default:
      Require(false, "the code of an error is a listed one", status.ToString());
  }
}

void CheckComplete(const ModelConfig& config, const formats::ModelGraph& graph) {
  const std::string text = config.DebugString();
  Require(config.name() == "m" && config.backend() == "espalier", "name and backend are set", text);
  Require(config.max_batch_size() >= 1 && config.max_batch_size() <= formats::kMaxMaxBatchSize,
          "max_batch_size is in range", text);
  Require(config.input_size() == 2 && config.output_size() == 1,
          "inputs and outputs are the model's", text);
  for (int i = 0; i < 2; ++i) {
    Require(config.input(i).name() == graph.inputs[i].name, "inputs are in the model's order",
            text);
    Require(config.input(i).data_type() == formats::ConfigDataType(graph.inputs[i].dtype),
            "types are the model's", text);
    Require(config.input(i).dims_size() + 1 == static_cast<int>(graph.inputs[i].shape.size()),
            "dims are without batch", text);
  }
  Require(config.instance_group_size() > 0, "there is an instance", text);
  Require(config.default_model_filename().find('/') == std::string::npos,
          "the file is in its folder", text);
  Require(formats::ReadModelSettings(config).ok(), "settings are good", text);
  ModelConfig copy;
  Require(copy.ParseFromString(config.SerializeAsString()), "it can be sent", text);
}

class Silent final : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int, int, const std::string&) override {}
};

}  // namespace

std::vector<std::string> Seeds() {
  return {
      "",
      "name: \"m\" platform: \"onnxruntime_onnx\" max_batch_size: 8\n"
      "input [ { name: \"x\" data_type: TYPE_FP32 dims: [3] } ]\n"
      "output [ { name: \"y\" data_type: TYPE_FP32 dims: [10] label_filename: \"l.txt\" } ]\n",
      "dynamic_batching { preferred_batch_size: [4, 8] max_queue_delay_microseconds: 100 "
      "priority_levels: 2\n"
      "  default_priority_level: 1 priority_queue_policy { key: 2 value { max_queue_size: 3 } } }\n"
      "instance_group [ { count: 2 kind: KIND_CPU }, { gpus: [0, 1] } ]\n",
      "version_policy { specific { versions: [1, 2] } } default_model_filename: \"m.onnx\"\n"
      "parameters { key: \"weight_memory\" value { string_value: \"smallest\" } } metric_tags { "
      "key: \"a\" value: \"b\" }\n"
      "model_warmup { name: \"w\" batch_size: 1 inputs { key: \"x\" value { dims: 3 zero_data: "
      "true } } }\n",
      "optimization { graph { level: 1 } } response_cache { enable: true }\n"
      "input { name: \"mask\" dims: [-1, 2, 2] } ensemble_scheduling { step { model_name: \"a\" } "
      "}\n",
  };
}

std::string MutateStructure(const std::string& input, std::mt19937_64& random) {
  static const std::vector<std::string> kWords = {
      "x",  "y",    "mask",  "m",        "espalier",      "onnxruntime",
      "..", "a/b",  "\xff",  "smallest", "weight_memory", "precision",
      "",   "bf16", "l.txt", "true",     "deterministic", "tensorflow"};
  ModelConfig config;
  Silent silent;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&silent);
  if (!parser.ParseFromString(input, &config)) return input;
  for (uint64_t changes = 1 + random() % 4; changes > 0; --changes)
    MutateMessage(config, kWords, random);
  std::string text;
  google::protobuf::TextFormat::PrintToString(config, &text);
  return text;
}

}  // namespace espalier::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace espalier;  // NOLINT(google-build-using-namespace): an extern "C" function
  static const formats::ModelGraph* const graph = new formats::ModelGraph(fuzz::Graph());
  const auto config =
      formats::ParseModelConfig({reinterpret_cast<const char*>(data), size}, "fuzz.pbtxt");
  if (!config.ok()) {
    fuzz::CheckRefusal(config.status());
    return 0;
  }
  std::vector<std::string> warnings;
  const auto complete = formats::CompleteModelConfig(*config, "m", *graph, &warnings);
  if (!complete.ok()) {
    fuzz::CheckRefusal(complete.status());
    return 0;
  }
  fuzz::CheckComplete(*complete, *graph);
  const auto again = formats::CompleteModelConfig(*complete, "m", *graph);
  fuzz::Require(
      again.ok() && again->SerializeAsString().size() == complete->SerializeAsString().size(),
      "completing twice changes nothing", complete->DebugString());
  return 0;
}
