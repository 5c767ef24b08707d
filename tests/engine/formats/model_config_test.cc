#include "engine/formats/model_config.h"

#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "engine/formats/model_settings.h"
#include "engine/tensor/device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/formats/onnx_builder.h"

namespace espalier::formats {
namespace {

using absl::StatusCode;
using espalier::testing::ExpectRefused;
using espalier::testing::TemporaryFolder;
using inference::ModelConfig;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// x FP32 [-1, 3], mask INT64 [-1, 2, 2] → y FP32 [-1, 10]; or with `batch` instead of -1.
ModelGraph Graph(int64_t batch = kBatch) {
  ModelGraph graph;
  graph.inputs = {{"x", DType::kFloat32, {batch, 3}}, {"mask", DType::kInt64, {batch, 2, 2}}};
  graph.outputs = {{"y", DType::kFloat32, {batch, 10}}};
  return graph;
}

ModelConfig Parse(const std::string& text) {
  auto config = ParseModelConfig(text, "config.pbtxt");
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : ModelConfig();
}

ModelConfig Complete(const std::string& text, const ModelGraph& graph = Graph(),
                     std::vector<std::string>* warnings = nullptr) {
  auto config = CompleteModelConfig(Parse(text), "m", graph, warnings);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : ModelConfig();
}

void ExpectInvalid(const std::string& text, std::vector<std::string> parts,
                   const ModelGraph& graph = Graph()) {
  parts.push_back("config of model 'm': ");
  ExpectRefused(CompleteModelConfig(Parse(text), "m", graph).status(), StatusCode::kInvalidArgument,
                parts);
}

void ExpectUnimplemented(const std::string& text, std::vector<std::string> parts,
                         const ModelGraph& graph = Graph()) {
  parts.push_back("config of model 'm': ");
  ExpectRefused(CompleteModelConfig(Parse(text), "m", graph).status(), StatusCode::kUnimplemented,
                parts);
}

// ---- text

TEST(ModelConfigTest, SyntaxErrorsNameFileLineAndColumn) {
  const auto refused = [](const std::string& text, const std::string& where) {
    ExpectRefused(ParseModelConfig(text, "dir/config.pbtxt").status(), StatusCode::kInvalidArgument,
                  {where});
  };
  refused("name: \"m\"\nmax_batch_size 8", "dir/config.pbtxt:2:16: ");
  refused("name: \"m\"\n  max_bach_size: 8", "dir/config.pbtxt:2:16: ");
  refused("max_bach_size: 8", "max_bach_size");
  refused("max_batch_size: 1\nmax_batch_size: 2", "dir/config.pbtxt:2:");
  refused("max_batch_size: 99999999999", "dir/config.pbtxt:1:");
  refused("input { name: \"x\"", "dir/config.pbtxt:1:");
  refused("input [ { data_type: TYPE_FLOAT } ]", "TYPE_FLOAT");
  refused("\x08\x08", "dir/config.pbtxt:1:");
  refused(std::string(2000, '{'), "dir/config.pbtxt:1:");
}

TEST(ModelConfigTest, StringsMustBeUtf8) {
  ExpectRefused(ParseModelConfig("name: \"\\377\"", "f").status(), StatusCode::kInvalidArgument,
                {"f: inference.ModelConfig.name is '\\xff', expected UTF-8"});
  ExpectRefused(ParseModelConfig("metric_tags { key: \"a\\000\" value: \"b\" }", "f").status(),
                StatusCode::kInvalidArgument, {"without NUL"});
}

TEST(ModelConfigTest, ALargeFileIsRefused) {
  const std::string comment = "#" + std::string(kMaxConfigBytes, 'x');
  ExpectRefused(ParseModelConfig(comment, "f").status(), StatusCode::kResourceExhausted,
                {"the limit is 1048576"});
  TemporaryFolder folder;
  folder.Write("config.pbtxt", comment);
  ExpectRefused(ReadModelConfig(folder.path()).status(), StatusCode::kResourceExhausted,
                {"config.pbtxt"});
}

TEST(ModelConfigTest, AFileIsReadFromTheModelsFolder) {
  TemporaryFolder folder;
  ExpectRefused(ReadModelConfig(folder.path()).status(), StatusCode::kNotFound, {"config.pbtxt"});
  folder.Write("config.pbtxt", "max_batch_size: 8");
  EXPECT_EQ(ReadModelConfig(folder.path())->max_batch_size(), 8);
  folder.Write("config.pbtxt", "default_model_filename: \"../m\"");
  ExpectRefused(ReadModelConfig(folder.path()).status(), StatusCode::kInvalidArgument,
                {"/config.pbtxt: default_model_filename is '../m'"});
  TemporaryFolder with_fifo;
  ASSERT_EQ(mkfifo((with_fifo.path() + "/config.pbtxt").c_str(), 0600), 0);
  ExpectRefused(ReadModelConfig(with_fifo.path()).status(), StatusCode::kInvalidArgument,
                {"is a FIFO"});
}

// ---- completion

TEST(ModelConfigTest, AMissingConfigIsCompletedFromTheModel) {
  std::vector<std::string> warnings;
  const ModelConfig config = Complete("", Graph(), &warnings);
  EXPECT_THAT(warnings, IsEmpty());
  EXPECT_EQ(config.name(), "m");
  EXPECT_EQ(config.backend(), "espalier");
  EXPECT_EQ(config.platform(), "espalier");
  EXPECT_EQ(config.max_batch_size(), kDefaultMaxBatchSize);
  ASSERT_EQ(config.input_size(), 2);
  EXPECT_EQ(config.input(0).name(), "x");
  EXPECT_EQ(config.input(0).data_type(), inference::TYPE_FP32);
  EXPECT_THAT(config.input(0).dims(), ElementsAre(3));
  EXPECT_EQ(config.input(1).data_type(), inference::TYPE_INT64);
  EXPECT_THAT(config.input(1).dims(), ElementsAre(2, 2));
  ASSERT_EQ(config.output_size(), 1);
  EXPECT_THAT(config.output(0).dims(), ElementsAre(10));
  EXPECT_EQ(config.version_policy().latest().num_versions(), 1u);
  ASSERT_EQ(config.instance_group_size(), 1);
  EXPECT_EQ(config.instance_group(0).kind(), inference::ModelInstanceGroup::KIND_CPU);
  EXPECT_EQ(config.instance_group(0).count(), 1);
  EXPECT_EQ(config.default_model_filename(), "model.onnx");
}

TEST(ModelConfigTest, ACompleteConfigStaysAsItIsWhenCompletedAgain) {
  const ModelConfig once = Complete("max_batch_size: 4 instance_group { count: 2 }");
  const auto twice = CompleteModelConfig(once, "m", Graph());
  ASSERT_TRUE(twice.ok()) << twice.status();
  EXPECT_EQ(twice->DebugString(), once.DebugString());
}

TEST(ModelConfigTest, WhatIsGivenIsKeptAndPutIntoTheModelsOrder) {
  const ModelConfig config = Complete(R"(
      name: "m"
      platform: "onnxruntime_onnx"
      max_batch_size: 16
      input [ { name: "mask" data_type: TYPE_INT64 dims: [2, 2] } ]
      output [ { name: "y" data_type: TYPE_FP32 dims: [10] label_filename: "labels.txt" } ]
      version_policy { specific { versions: [1, 3] } }
      instance_group [ { count: 3 kind: KIND_CPU }, { kind: KIND_AUTO } ]
      default_model_filename: "pruned.onnx"
      dynamic_batching { preferred_batch_size: [4, 16] max_queue_delay_microseconds: 100 }
      parameters { key: "weight_memory" value { string_value: "smallest" } }
      metric_tags { key: "team" value: "vision" })");
  EXPECT_EQ(config.backend(), "espalier");
  EXPECT_EQ(config.platform(), "espalier");
  EXPECT_EQ(config.max_batch_size(), 16);
  EXPECT_EQ(config.input(0).name(), "x");
  EXPECT_EQ(config.input(1).name(), "mask");
  EXPECT_EQ(config.output(0).label_filename(), "labels.txt");
  EXPECT_THAT(config.version_policy().specific().versions(), ElementsAre(1, 3));
  EXPECT_EQ(config.instance_group(0).count(), 3);
  EXPECT_EQ(config.instance_group(1).count(), 1);
  EXPECT_EQ(config.default_model_filename(), "pruned.onnx");
  EXPECT_EQ(config.dynamic_batching().max_queue_delay_microseconds(), 100u);
  EXPECT_EQ(config.metric_tags().at("team"), "vision");
}

TEST(ModelConfigTest, AModelWithoutABatchDimensionHasMaxBatchSizeZeroAndFullDims) {
  const ModelConfig config = Complete("", Graph(4));
  EXPECT_EQ(config.max_batch_size(), 0);
  EXPECT_THAT(config.input(0).dims(), ElementsAre(4, 3));
  EXPECT_THAT(Complete("input { name: \"x\" dims: [4, 3] }", Graph(4)).input(0).dims(),
              ElementsAre(4, 3));
  ExpectInvalid("max_batch_size: 8",
                {"max_batch_size is 8, expected 0", "no batch dimension, 'x' is [4, 3]"}, Graph(4));
  ExpectInvalid("input { name: \"x\" dims: [3] }", {"input 'x': dims are [3], expected [4, 3]"},
                Graph(4));
}

TEST(ModelConfigTest, ABatchDimensionInSomeValuesOnlyIsRefused) {
  ModelGraph graph = Graph();
  graph.outputs[0].shape = {10};
  ExpectUnimplemented("", {"'mask' [-1, 2, 2]", "'y' [10]"}, graph);
}

TEST(ModelConfigTest, DimsWithTheBatchDimensionAreTakenForADefaultBatchSize) {
  std::vector<std::string> warnings;
  const ModelConfig config = Complete("input { name: \"x\" dims: [-1, 3] }", Graph(), &warnings);
  EXPECT_EQ(config.max_batch_size(), kDefaultMaxBatchSize);
  EXPECT_THAT(config.input(0).dims(), ElementsAre(3));
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("'x': dims [-1, 3] with max_batch_size 0")));
}

TEST(ModelConfigTest, DimsThatContradictTheModelAreRefusedWithBothAndTheBatchDimension) {
  ExpectInvalid("max_batch_size: 8 input { name: \"x\" dims: [4] }",
                {"input 'x': dims are [4], expected [3] as the model has [-1, 3]",
                 "with max_batch_size 8 dims leave out the batch dimension"});
  ExpectInvalid("max_batch_size: 8 input { name: \"x\" dims: [-1, 3] }",
                {"dims are [-1, 3], expected [3]"});
  ExpectInvalid("input { name: \"x\" dims: [1, 3] }", {"dims are [1, 3], expected [3]"});
  ExpectInvalid("output { name: \"y\" dims: [-1] }", {"output 'y': dims are [-1], expected [10]"});
  ExpectInvalid("output { name: \"y\" dims: [0] }",
                {"output 'y': dims has 0, expected positive numbers or -1"});
}

TEST(ModelConfigTest, MoreDimsThanAnyTensorHasAreRefused) {
  std::string dims = "1";
  for (int i = 0; i < 32; ++i) dims += ", 1";
  ExpectInvalid("input { name: \"x\" dims: [" + dims + "] }",
                {"dims has 33 entries, expected at most 32"});
}

TEST(ModelConfigTest, TypesAndNamesThatContradictTheModelAreRefusedWithBoth) {
  ExpectInvalid("input { name: \"x\" data_type: TYPE_FP16 }",
                {"input 'x': data_type is TYPE_FP16, expected TYPE_FP32 as in the model"});
  ExpectInvalid("input { name: \"x\" data_type: 99 }", {"input 'x': data_type is 99"});
  ExpectInvalid("input { name: \"z\" }", {"input 'z' is not in the model, expected 'x', 'mask'"});
  ExpectInvalid("output { name: \"z\" }", {"output 'z' is not in the model, expected 'y'"});
  ExpectInvalid("input [ { name: \"x\" }, { name: \"x\" } ]", {"input 'x' is listed twice"});
  ExpectInvalid("input { dims: [3] }", {"the name of an input is empty"});
  ExpectInvalid("name: \"other\"", {"name is 'other', expected 'm' as the directory"});
}

// ---- values

TEST(ModelConfigTest, BackendsOfOtherModelFormatsAreRefused) {
  for (const char* good :
       {"backend: \"onnxruntime\"", "backend: \"espalier\"", "platform: \"onnxruntime_onnx\""}) {
    EXPECT_EQ(Complete(good).backend(), "espalier");
  }
  ExpectInvalid("backend: \"tensorflow\"",
                {"backend is 'tensorflow', expected one of espalier, onnxruntime"});
  ExpectInvalid("platform: \"tensorrt_plan\"", {"platform is 'tensorrt_plan'", "only ONNX models"});
}

TEST(ModelConfigTest, CountsOutOfRangeAreRefused) {
  ExpectInvalid("max_batch_size: -1", {"max_batch_size is -1, expected 0 to 65536"});
  ExpectInvalid("max_batch_size: 65537", {"max_batch_size is 65537"});
  ExpectInvalid("instance_group { count: -1 }", {"instance_group.count is -1, expected 0 to 256"});
  ExpectInvalid("instance_group { count: 257 }", {"instance_group.count is 257"});
  ExpectInvalid("instance_group [ { count: 200 }, { count: 200 } ]",
                {"all instance_groups is 400, expected 0 to 256"});
  ExpectInvalid("instance_group { kind: 7 }", {"instance_group.kind is 7"});
  ExpectInvalid("version_policy { specific {} }", {"names no version"});
  ExpectInvalid("version_policy { specific { versions: [0] } }", {"version_policy.specific is 0"});
  ExpectInvalid("version_policy { specific { versions: [2, 2] } }", {"names version 2 twice"});
  EXPECT_EQ(Complete("version_policy { latest {} }").version_policy().latest().num_versions(), 1u);
  EXPECT_TRUE(Complete("version_policy { all {} }").version_policy().has_all());
}

TEST(ModelConfigTest, BatchingThatContradictsItselfIsRefused) {
  ExpectInvalid("max_batch_size: 8 dynamic_batching { preferred_batch_size: [16] }",
                {"preferred_batch_size is 16, expected 1 to 8"});
  ExpectInvalid("dynamic_batching { preferred_batch_size: [257] }",
                {"preferred_batch_size is 257, expected 1 to max_batch_size 256"});
  ExpectInvalid("dynamic_batching { preferred_batch_size: [0] }", {"preferred_batch_size is 0"});
  ExpectInvalid("dynamic_batching { priority_levels: 2 }",
                {"default_priority_level is 0, expected 1 to"});
  ExpectInvalid("dynamic_batching { default_priority_level: 1 }",
                {"default_priority_level is 1, expected 0 to"});
  ExpectInvalid(
      "dynamic_batching { priority_levels: 2 default_priority_level: 1"
      " priority_queue_policy { key: 3 value {} } }",
      {"priority_queue_policy has level 3, expected 1 to priority_levels 2"});
  std::vector<std::string> warnings;
  Complete("dynamic_batching {}", Graph(4), &warnings);
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("dynamic_batching has no effect")));
}

TEST(ModelConfigTest, FileNamesStayInTheirFolder) {
  for (const char* bad : {"../m.onnx", "/etc/passwd", "a/m.onnx", ".", "..", "a/"}) {
    ExpectInvalid(std::string("default_model_filename: \"") + bad + "\"",
                  {"default_model_filename is '", bad});
  }
  for (const char* bad : {"../l.txt", "/l.txt", "a/../../l", ".."}) {
    ExpectInvalid(std::string("output { name: \"y\" label_filename: \"") + bad + "\" }",
                  {"output 'y': label_filename is '", bad});
    ExpectInvalid(std::string("model_warmup { inputs { key: \"x\" value { input_data_file: \"") +
                      bad + "\" } } }",
                  {"input_data_file is '", bad});
  }
  Complete("output { name: \"y\" label_filename: \"labels/l.txt\" }");
}

// ---- what Espalier does not do

TEST(ModelConfigTest, SettingsThatWouldChangeAnswersAreRefused) {
  ExpectUnimplemented("ensemble_scheduling {}", {"ensembles are not supported"});
  ExpectUnimplemented("platform: \"ensemble\"", {"ensembles are not supported"});
  ExpectUnimplemented("sequence_batching {}", {"sequence_batching"});
  ExpectUnimplemented("model_transaction_policy { decoupled: true }", {"decoupled"});
  ExpectUnimplemented("batch_input {}", {"batch_input"});
  ExpectUnimplemented("batch_output {}", {"batch_output"});
  ExpectUnimplemented("model_operations { op_library_filename: \"x.so\" }", {"never loaded"});
  ExpectUnimplemented("model_repository_agents { agents { name: \"checksum\" } }", {"agents"});
  ExpectUnimplemented("instance_group { kind: KIND_MODEL }", {"KIND_MODEL"});
  ExpectUnimplemented("input { name: \"x\" reshape {} }", {"input 'x': reshape"});
  ExpectUnimplemented("input { name: \"x\" is_shape_tensor: true }", {"is_shape_tensor"});
  ExpectUnimplemented("input { name: \"x\" allow_ragged_batch: true }", {"allow_ragged_batch"});
  ExpectUnimplemented("input { name: \"x\" optional: true }", {"optional inputs"});
  ExpectUnimplemented("output { name: \"y\" is_non_linear_format_io: true }",
                      {"is_non_linear_format_io"});
}

TEST(ModelConfigTest, SettingsWithoutEffectAreAcceptedWithAWarningEach) {
  std::vector<std::string> warnings;
  Complete(R"(
      dynamic_batching { max_queue_delay_microseconds: 1 priority_levels: 1 default_priority_level: 1 }
      metric_tags { key: "team" value: "vision" }
      optimization { cuda { graphs: true } }
      response_cache { enable: true }
      model_metrics {}
      runtime: "onnxruntime"
      cc_model_filenames { key: "9.0" value: "m.onnx" }
      instance_group { passive: true host_policy: "numa0" profile: "0" rate_limiter {} secondary_devices {} }
      input { name: "x" format: FORMAT_NCHW })",
           Graph(), &warnings);
  EXPECT_THAT(
      warnings,
      ::testing::UnorderedElementsAre(
          HasSubstr("metric_tags"), HasSubstr("optimization"), HasSubstr("response_cache"),
          HasSubstr("model_metrics"), HasSubstr("runtime"), HasSubstr("cc_model_filenames"),
          HasSubstr("passive"), HasSubstr("host_policy"), HasSubstr("profile"),
          HasSubstr("rate_limiter"), HasSubstr("secondary_devices"), HasSubstr("input.format")));
}

// ---- Espalier's own settings

ModelConfig WithParameter(const std::string& key, const std::string& value) {
  ModelConfig config;
  (*config.mutable_parameters())[key].set_string_value(value);
  return config;
}

TEST(ModelSettingsTest, DefaultsHoldWithoutParameters) {
  std::vector<std::string> warnings;
  const auto settings = ReadModelSettings(WithParameter("determinstic", "true"), &warnings);
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("'determinstic': known are precision, weight_memory, "
                                              "deterministic,")));
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->precision, Precision::kAsStored);
  EXPECT_EQ(settings->weight_memory, WeightMemory::kBalanced);
  EXPECT_FALSE(settings->deterministic);
  EXPECT_FALSE(settings->flush_subnormals);
  EXPECT_EQ(settings->execute_delay_millis, 0);
  EXPECT_FALSE(settings->pads_to_preferred);
  EXPECT_EQ(settings->threads, 0);
}

TEST(ModelSettingsTest, EveryValueIsRead) {
  EXPECT_EQ(ReadModelSettings(WithParameter("precision", "bf16"))->precision, Precision::kBFloat16);
  EXPECT_EQ(ReadModelSettings(WithParameter("precision", "fp32"))->precision, Precision::kFloat32);
  EXPECT_EQ(ReadModelSettings(WithParameter("weight_memory", "smallest"))->weight_memory,
            WeightMemory::kSmallest);
  EXPECT_EQ(ReadModelSettings(WithParameter("weight_memory", "fastest"))->weight_memory,
            WeightMemory::kFastest);
  EXPECT_TRUE(ReadModelSettings(WithParameter("deterministic", "true"))->deterministic);
  EXPECT_FALSE(ReadModelSettings(WithParameter("deterministic", "false"))->deterministic);
  EXPECT_TRUE(ReadModelSettings(WithParameter("flush_subnormals", "true"))->flush_subnormals);
  EXPECT_TRUE(
      ReadModelSettings(WithParameter("allowed_batch_sizes", "preferred"))->pads_to_preferred);
  EXPECT_EQ(ReadModelSettings(WithParameter("execute_delay_ms", "25"))->execute_delay_millis, 25);
  for (const int threads : {1, AvailableCpus()}) {
    EXPECT_EQ(ReadModelSettings(WithParameter("threads", absl::StrCat(threads)))->threads, threads);
  }
}

TEST(ModelSettingsTest, ABadValueListsTheGoodOnesAndStopsTheLoad) {
  ExpectRefused(
      ReadModelSettings(WithParameter("weight_memory", "fast")).status(),
      StatusCode::kInvalidArgument,
      {"parameter 'weight_memory' is 'fast', expected one of smallest, balanced, fastest"});
  ExpectRefused(ReadModelSettings(WithParameter("precision", "")).status(),
                StatusCode::kInvalidArgument, {"expected one of as_stored, fp32, bf16"});
  for (const char* bad : {"-1", "600001", "", "1.5", "soon", "99999999999999999999"}) {
    ExpectRefused(
        ReadModelSettings(WithParameter("execute_delay_ms", bad)).status(),
        StatusCode::kInvalidArgument,
        {absl::StrCat("parameter 'execute_delay_ms' is '", bad, "', expected 0 to 600000")});
  }
  const std::vector<std::string> bad_threads = {"0", "-1", "", "two",
                                                absl::StrCat(AvailableCpus() + 1)};
  for (const std::string& bad : bad_threads) {
    ExpectRefused(
        ReadModelSettings(WithParameter("threads", bad)).status(), StatusCode::kInvalidArgument,
        {absl::StrCat("parameter 'threads' is '", bad, "', expected 1 to ", AvailableCpus())});
  }
  ExpectRefused(ReadModelSettings(WithParameter("deterministic", "1")).status(),
                StatusCode::kInvalidArgument, {"expected one of true, false"});
  ExpectRefused(ReadModelSettings(WithParameter("allowed_batch_sizes", "2,6")).status(),
                StatusCode::kInvalidArgument, {"expected one of any, preferred"});
  ExpectInvalid("parameters { key: \"flush_subnormals\" value { string_value: \"yes\" } }",
                {"expected one of true"});
}

}  // namespace
}  // namespace espalier::formats
