#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "clients/cli/bench_inputs.h"
#include "clients/cli/command.h"
#include "clients/cli/file.h"
#include "clients/cli/load_levels.h"
#include "clients/cli/npy.h"
#include "tests/clients/fake_server.h"

namespace espalier::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

struct Outcome {
  int code;
  std::string out, err;
};

class BenchCommandTest : public ::testing::Test {
 protected:
  BenchCommandTest() : folder_(absl::StrCat(::testing::TempDir(), "/bench_test_", getpid())) {
    std::filesystem::create_directories(folder_);
  }
  ~BenchCommandTest() override { std::filesystem::remove_all(folder_); }

  Outcome Bench(std::vector<std::string> flags) {
    std::vector<std::string> arguments = {"bench", "digits", "--warmup=0.02", "--duration=0.2",
                                          "--url=" + server_.url};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    std::vector<const char*> pointers;
    for (const std::string& argument : arguments) pointers.push_back(argument.c_str());
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    const int code = RunCommandLine(pointers);
    return {code, ::testing::internal::GetCapturedStdout(),
            ::testing::internal::GetCapturedStderr()};
  }
  std::string WriteNpy(const std::string& name, std::vector<int64_t> shape,
                       std::vector<float> values) {
    const std::string path = absl::StrCat(folder_, "/", name);
    EXPECT_TRUE(
        WriteFile(path, *FormatNpy(*client::MakeTensor<float>("", std::move(shape), values))).ok());
    return path;
  }

  testing::FakeServer server_;
  const std::string folder_;
};

TEST_F(BenchCommandTest, PrintsATableWithARowForEachLoad) {
  const Outcome outcome = Bench({"--concurrency=1,3"});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  for (const char* text : {"CONCURRENCY", "REQUESTS/S", "P50", "P99.9", "MEAN", "ERRORS", "random"})
    EXPECT_THAT(outcome.out, HasSubstr(text));
  EXPECT_THAT(outcome.out, Not(HasSubstr("COMPUTE INFER"))) << "this server has no statistics";
  EXPECT_THAT(outcome.out, ::testing::ContainsRegex("\n +1 +[0-9.]+ (.*\n) +3 +[0-9.]+ "));
}

TEST_F(BenchCommandTest, JsonHasLedgerHistogramDateCommitAndCommand) {
  const std::string path = absl::StrCat(folder_, "/out.json");
  const std::string hgrm = absl::StrCat(folder_, "/out.hgrm");
  const Outcome outcome = Bench({"--rate=200", "--json=" + path, "--hgrm=" + hgrm, "--batch=2"});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("ITEMS/S"));
  const std::string json = ReadFile(path).value();
  for (const char* text :
       {"\"balances\": true", "\"rate\": 200", "\"histogram_us\": [[", "\"date\": \"20",
        "\"commit\": \"", "\"command\": \"", "\"p99_9\": ", "\"batch\": 2", "\"send_delay_us\""})
    EXPECT_THAT(json, HasSubstr(text));
  EXPECT_THAT(ReadFile(hgrm).value(), HasSubstr("1/(1-Percentile)"));
}

TEST_F(BenchCommandTest, SendsTheItemsOfAFileInTurnAndAroundItsEnd) {
  const std::string file = WriteNpy("three.npy", {3, 4}, {1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3});
  const Outcome outcome = Bench({"--input", file, "--batch=2"});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("2 distinct requests of batch 2, 3 items of "));
  const std::string& bytes = server_.service.last_request.raw_input_contents(0);
  const std::vector<float> sent = *client::Values<float>({"x", "FP32", {2, 4}, bytes});
  EXPECT_TRUE((sent[0] == 1 && sent[4] == 2) || (sent[0] == 3 && sent[4] == 1)) << sent[0];
}

TEST_F(BenchCommandTest, ADirectoryIsThePoolOfItsFiles) {
  std::filesystem::create_directory(folder_ + "/pool");
  WriteNpy("pool/a.npy", {2, 4}, {1, 1, 1, 1, 2, 2, 2, 2});
  WriteNpy("pool/b.npy", {4}, {3, 3, 3, 3});  // one item, without the dimension that counts them
  const Outcome outcome = Bench({"--input=" + folder_ + "/pool"});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("3 distinct requests of batch 1, 3 items of "));
  const Outcome wrong = Bench({"--input=" + WriteNpy("wrong.npy", {2, 5}, std::vector<float>(10))});
  EXPECT_EQ(wrong.code, kExitFailure);
  EXPECT_THAT(wrong.err, HasSubstr("expected items FP32 [4]"));
  EXPECT_THAT(wrong.err, HasSubstr("got FP32 [2, 5]"));
  const std::string text = folder_ + "/text";
  std::ofstream(text) << "no tensor";
  const Outcome other = Bench({"--input=" + text});
  EXPECT_EQ(other.code, kExitFailure);
  EXPECT_THAT(other.err, HasSubstr(text + ": expected items of 16 bytes for "));
  EXPECT_THAT(other.err, HasSubstr("got 9 bytes"));
}

TEST_F(BenchCommandTest, PassesPriorityAndQueueTimeout) {
  EXPECT_EQ(Bench({"--priority=2", "--queue-timeout=5000"}).code, kExitOk);
  const auto& parameters = server_.service.last_request.parameters();
  EXPECT_EQ(parameters.at("priority").int64_param(), 2);
  EXPECT_EQ(parameters.at("timeout").int64_param(), 5000);
}

TEST_F(BenchCommandTest, AServerWithoutSharedMemoryIsOneErrorAndLeavesNothingBehind) {
  const Outcome outcome = Bench({"--shared_memory=system"});
  EXPECT_EQ(outcome.code, kExitFailure);
  EXPECT_THAT(outcome.err, HasSubstr("UNIMPLEMENTED"));
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
    EXPECT_THAT(entry.path().string(), Not(HasSubstr(absl::StrCat("bench-", getpid()))));
}

TEST_F(BenchCommandTest, MistakesAreToldBeforeAnyLoad) {
  EXPECT_EQ(Bench({"--shared_memory=cuda"}).code, kExitUsage);
  EXPECT_EQ(Bench({"--rate=5", "--concurrency=5"}).code, kExitUsage);
  EXPECT_EQ(Bench({"--duration=0"}).code, kExitUsage);
  EXPECT_EQ(Bench({"--concurrency=0"}).code, kExitUsage);
  EXPECT_THAT(Bench({"--shape=4,4"}).err, HasSubstr("expected 1 sizes"));
  EXPECT_THAT(Bench({"--input=nothing=x"}).err, HasSubstr("the model has no 'nothing'"));
  EXPECT_EQ(server_.service.last_request.model_name(), "");
}

TEST_F(BenchCommandTest, AModelThatIsNotThereIsOneError) {
  std::vector<const char*> arguments = {"bench", "other", server_.url.c_str()};
  const std::string url = "--url=" + server_.url;
  arguments[2] = url.c_str();
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(RunCommandLine(arguments), kExitFailure);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("unknown model 'other'"));
}

TEST(LoadLevelsTest, ListsAndRanges) {
  EXPECT_THAT(*ParseLevels("rate", "1,8,64", 1, 100), ElementsAre(1, 8, 64));
  EXPECT_THAT(*ParseLevels("rate", "2:5", 1, 100), ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(*ParseLevels("rate", "10:50:20", 1, 100), ElementsAre(10, 30, 50));
  EXPECT_THAT(*ParseLevels("rate", "1:20:x4,99.5", 1, 100), ElementsAre(1, 4, 16, 99.5));
  for (const char* wrong : {"", "a", "0", "101", "5:2", "1:9:0", "1:9:-1", "1:9:x1", "1:2:3:4",
                            "1,", "nan", "1:9:nan", "1:9:x"}) {
    const auto levels = ParseLevels("rate", wrong, 1, 100);
    EXPECT_TRUE(IsWrongUsage(levels.status())) << wrong;
  }
  EXPECT_THAT(ParseLevels("rate", "1:100:0.1", 1, 100).status().message(),
              HasSubstr("at most 256"));
}

inference::ModelMetadataResponse Metadata(const std::string& datatype, std::vector<int64_t> shape) {
  inference::ModelMetadataResponse metadata;
  metadata.set_name("m");
  auto* input = metadata.add_inputs();
  input->set_name("x");
  input->set_datatype(datatype);
  for (int64_t dim : shape) input->add_shape(dim);
  return metadata;
}

absl::StatusOr<BenchInputs> Inputs(const inference::ModelMetadataResponse& metadata, int64_t batch,
                                   std::vector<const char*> flags = {}) {
  flags.insert(flags.begin(), "m");
  absl::StatusOr<Args> args = Args::Parse(BenchCommand().spec, flags);
  EXPECT_TRUE(args.ok()) << args.status();
  return MakeBenchInputs(*args, metadata, batch);
}

TEST(BenchInputsTest, RandomInputsExistForEveryDatatype) {
  for (const char* datatype : {"BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16",
                               "INT32", "INT64", "FP16", "BF16", "FP32", "FP64", "BYTES"}) {
    const auto inputs = Inputs(Metadata(datatype, {-1, 3}), 2);
    ASSERT_TRUE(inputs.ok()) << datatype << inputs.status();
    const client::Tensor& tensor = inputs->requests[0].inputs[0];
    EXPECT_THAT(tensor.shape, ElementsAre(2, 3));
    EXPECT_TRUE(client::CheckTensor(tensor).ok()) << datatype;
    if (std::string(datatype) != "BOOL") {
      EXPECT_NE(tensor.bytes, inputs->requests[1].inputs[0].bytes) << datatype;
    }
  }
  EXPECT_FALSE(Inputs(Metadata("FP7", {-1, 3}), 1).ok());
}

TEST(BenchInputsTest, OpenDimensionsAndBatchesAreSaidOrRefused) {
  EXPECT_THAT(Inputs(Metadata("FP32", {-1, -1, 8}), 1).status().message(),
              HasSubstr("--shape is needed for x FP32 [-1, -1, 8]"));
  EXPECT_THAT(
      Inputs(Metadata("FP32", {-1, -1, 8}), 4, {"--shape=5,8"})->requests[0].inputs[0].shape,
      ElementsAre(4, 5, 8));
  EXPECT_THAT(Inputs(Metadata("FP32", {3, 8}), 2).status().message(),
              HasSubstr("has no batch dimension"));
  EXPECT_THAT(Inputs(Metadata("FP32", {-1, 1 << 20}), 1 << 20).status().message(),
              HasSubstr("smaller --batch"));
}

TEST(BenchInputsTest, DistinctRequestsAreFewWhenTheyAreLarge) {
  const auto large = Inputs(Metadata("FP32", {-1, 4 << 20}), 1);
  EXPECT_EQ(large->requests.size(), 4u) << "64 MiB of requests of 16 MiB";
  EXPECT_EQ(Inputs(Metadata("FP32", {-1, 4}), 1)->requests.size(), 1024u);
}

}  // namespace
}  // namespace espalier::cli
