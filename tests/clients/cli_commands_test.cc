#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>

#include "clients/cli/command.h"
#include "clients/cli/file.h"
#include "clients/cli/npy.h"
#include "tests/clients/fake_server.h"
#include "tests/clients/run_line.h"

namespace espalier::cli {
namespace {

using ::testing::HasSubstr;

class CommandsTest : public ::testing::Test {
 protected:
  ~CommandsTest() override {
    for (const std::string& path : written_) std::remove(path.c_str());
  }
  Outcome RunOnServer(std::vector<std::string> arguments) {
    arguments.push_back("--url=" + server_.url);
    return RunLine(std::move(arguments));
  }
  std::string Write(const std::string& name, const std::string& content) {
    written_.push_back(absl::StrCat(::testing::TempDir(), "/commands_test_", getpid(), "_", name));
    EXPECT_TRUE(WriteFile(written_.back(), content).ok());
    return written_.back();
  }
  std::string WriteNpy(std::vector<float> values) {
    const int64_t items = static_cast<int64_t>(values.size()) / 4;
    return Write("input.npy",
                 FormatNpy(*client::MakeTensor<float>("", {items, 4}, values)).value());
  }
  // Three 2 × 2 images, brightest at pixel 0, 3 and 1.
  std::string WriteImages() {
    return Write("images",
                 std::string("\0\0\x08\3\0\0\0\3\0\0\0\2\0\0\0\2", 16) + std::string("\xFF\1\1\1"
                                                                                     "\1\1\1\xFF"
                                                                                     "\1\xFF\1\1",
                                                                                     12));
  }
  std::string WriteLabels(const std::string& labels) {
    return Write("labels",
                 std::string("\0\0\x08\1\0\0\0", 7) + static_cast<char>(labels.size()) + labels);
  }

  testing::FakeServer server_;
  std::vector<std::string> written_;
};

TEST(CommandLineTest, HelpIsSuccessAndNamesEveryCommand) {
  EXPECT_THAT(RunLine({"delta", "--help"}).out,
              AllOf(HasSubstr("delta push"), Not(HasSubstr("\n  inspect"))));
  const Outcome outcome = RunLine({"--help"});
  EXPECT_EQ(outcome.code, kExitOk);
  for (const char* name :
       {"models", "infer", "evaluate", "bench", "inspect", "plan", "advise", "keygen"}) {
    EXPECT_THAT(outcome.out, HasSubstr(name));
    const Outcome help = RunLine({name, "--help"});
    EXPECT_EQ(help.code, kExitOk);
    EXPECT_THAT(help.out, HasSubstr(absl::StrCat("Usage: espalier ", name)));
    EXPECT_THAT(help.out, HasSubstr("Example")) << name << " --help teaches by example";
  }
}

TEST(CommandLineTest, MistakesExitWithTwoAndSayWhatToDo) {
  EXPECT_EQ(RunLine({}).code, kExitUsage);
  const Outcome unknown = RunLine({"infre"});
  EXPECT_EQ(unknown.code, kExitUsage);
  EXPECT_THAT(unknown.err, HasSubstr("did you mean 'infer'?"));
  EXPECT_EQ(RunLine({"models", "--bogus"}).code, kExitUsage);
  EXPECT_EQ(RunLine({"models", "--deadline", "never"}).code, kExitUsage);
  EXPECT_EQ(RunLine({"models", "--url", "http://localhost:8000"}).code, kExitUsage);
  EXPECT_EQ(RunLine({"infer"}).code, kExitUsage);
  const Outcome evaluate = RunLine({"evaluate", "m"});
  EXPECT_EQ(evaluate.code, kExitUsage);
  EXPECT_THAT(evaluate.err, HasSubstr("--images is missing"));
}

TEST(CommandLineTest, MissingServerSaysWhereItLookedAndWhatToDo) {
  const Outcome outcome = RunLine({"models", "--url", "127.0.0.1:1"});
  EXPECT_EQ(outcome.code, kExitFailure);
  EXPECT_THAT(outcome.err, HasSubstr("no server at 127.0.0.1:1"));
  EXPECT_THAT(outcome.err, HasSubstr("--url"));
}

TEST_F(CommandsTest, ModelsShowsFactsAndReasons) {
  const Outcome outcome = RunOnServer({"models"});
  EXPECT_EQ(outcome.code, kExitOk);
  EXPECT_THAT(outcome.out, HasSubstr("block_csr(16) x1"));
  EXPECT_THAT(outcome.out, HasSubstr("90.00 %"));
  EXPECT_THAT(outcome.out, HasSubstr("diagonal(16) x1"));
  EXPECT_THAT(outcome.out, HasSubstr("2.0 KiB of 20.0 KiB"));
  EXPECT_THAT(outcome.out, HasSubstr("gone: model.onnx: unknown op 'Foo' in node 'n1'"));
  EXPECT_THAT(RunOnServer({"models", "--ready"}).out, Not(HasSubstr("gone")));
  EXPECT_THAT(RunOnServer({"models", "--json"}).out, HasSubstr("\"resident_weight_bytes\": 2048"));
}

TEST_F(CommandsTest, InferPrintsValuesTopAndJson) {
  const std::string file = WriteNpy({1, 2, 3, 4, 9, 2, 3, 4});
  const Outcome values = RunOnServer({"infer", "digits", "--input", file});
  EXPECT_EQ(values.code, kExitOk) << values.err;
  EXPECT_THAT(values.out,
              HasSubstr("digits version 3\nlogits FP32 [2, 4]\n  0:  2 4 6 8\n  1:  18 4 6 8\n"));
  const Outcome top = RunOnServer({"infer", "digits", "--input", "input=" + file, "--top", "2"});
  EXPECT_THAT(top.out, HasSubstr("  1:  0 (18) 3 (8)\n"));
  EXPECT_THAT(RunOnServer({"infer", "digits", "--input", file, "--json"}).out,
              HasSubstr("\"data\": [2, 4, 6, 8, 18, 4, 6, 8]"));
  EXPECT_THAT(RunOnServer({"infer", "digits", "--input", file, "--json", "--top", "1"}).out,
              HasSubstr("\"index\": 3,"));
  EXPECT_THAT(RunOnServer({"infer", "digits", "--input", file, "--limit", "1"}).out,
              HasSubstr("[1, 4]"));
}

TEST_F(CommandsTest, InferWritesOutputsAsNpy) {
  const std::string out = Write("out.npy", "");
  ASSERT_EQ(
      RunOnServer({"infer", "digits", "--input", WriteNpy({1, 2, 3, 4}), "--output", out}).code,
      kExitOk);
  auto tensor = ParseNpy(ReadFile(out).value(), out);
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(client::Values<float>(*tensor).value(), (std::vector<float>{2, 4, 6, 8}));
}

TEST_F(CommandsTest, InferTakesRawFilesAndImages) {
  const std::string raw = Write("raw", std::string(32, '\0'));
  EXPECT_THAT(RunOnServer({"infer", "digits", "--input", raw}).out,
              HasSubstr("logits FP32 [2, 4]"));
  EXPECT_THAT(RunOnServer({"infer", "digits", "--input", raw, "--shape", "1,8"}).out,
              HasSubstr("[1, 8]"));
  EXPECT_THAT(
      RunOnServer({"infer", "digits", "--input", WriteImages(), "--limit", "2", "--top", "1"}).out,
      HasSubstr("  0:  0 (2)\n  1:  3 (2)\n"));
  const Outcome odd = RunOnServer({"infer", "digits", "--input", Write("odd", "12345")});
  EXPECT_EQ(odd.code, kExitFailure);
  EXPECT_THAT(odd.err, HasSubstr("got 5 bytes"));
}

TEST_F(CommandsTest, InferExplainsMistakes) {
  const std::string file = WriteNpy({1, 2, 3, 4});
  const Outcome unknown_model = RunOnServer({"infer", "nothing", "--input", file});
  EXPECT_EQ(unknown_model.code, kExitFailure);
  EXPECT_THAT(unknown_model.err, HasSubstr("NOT_FOUND: unknown model 'nothing'"));
  const Outcome unknown_input = RunOnServer({"infer", "digits", "--input", "image=" + file});
  EXPECT_EQ(unknown_input.code, kExitUsage);
  EXPECT_THAT(unknown_input.err, HasSubstr("the model has no 'image'; it has input"));
  const Outcome no_input = RunOnServer({"infer", "digits"});
  EXPECT_EQ(no_input.code, kExitUsage);
  EXPECT_THAT(no_input.err, HasSubstr("give --input input=FILE"));
  EXPECT_EQ(RunOnServer({"infer", "digits", "--input", file, "--input", file}).code, kExitUsage);
  EXPECT_EQ(RunOnServer({"infer", "digits", "--input", "/nonexistent.npy"}).code, kExitFailure);
  EXPECT_EQ(
      RunOnServer({"infer", "digits", "--input", Write("raw", "1234"), "--shape", "1,-4"}).code,
      kExitUsage);
}

TEST_F(CommandsTest, EvaluateReportsAccuracyLatencyAndMemory) {
  const std::string images = WriteImages(), labels = WriteLabels(std::string("\0\3\2", 3));
  const Outcome table = RunOnServer({"evaluate", "digits", "--images", images, "--labels", labels});
  EXPECT_EQ(table.code, kExitOk) << table.err;
  EXPECT_THAT(table.out, HasSubstr("66.67 %"));
  EXPECT_THAT(table.out, HasSubstr("2.0 KiB of 20.0 KiB"));
  EXPECT_THAT(table.out, HasSubstr("3 images; latency of a request of one image"));
  const Outcome json = RunOnServer({"evaluate", "digits", "digits", "--images", images, "--labels",
                                    labels, "--batch", "2", "--json"});
  EXPECT_EQ(json.code, kExitOk) << json.err;
  EXPECT_THAT(json.out, HasSubstr("\"correct\": 2"));
  EXPECT_THAT(json.out, HasSubstr("\"batch\": 2"));
  EXPECT_THAT(
      RunOnServer({"evaluate", "digits", "--images", images, "--labels", labels, "--limit", "2"})
          .out,
      HasSubstr("100.00 %"));
}

TEST_F(CommandsTest, EvaluateRefusesWhatDoesNotFit) {
  const std::string images = WriteImages();
  const Outcome labels =
      RunOnServer({"evaluate", "digits", "--images", images, "--labels", WriteLabels("ab")});
  EXPECT_EQ(labels.code, kExitFailure);
  EXPECT_THAT(labels.err, HasSubstr("got 3 images and labels of rank 1 with 2 items"));
  const std::string mnist = "tests/data/mnist/t10k-images-idx3-ubyte.gz";
  const Outcome shape = RunOnServer({"evaluate", "digits", "--images", mnist, "--labels",
                                     "tests/data/mnist/t10k-labels-idx1-ubyte.gz"});
  EXPECT_EQ(shape.code, kExitFailure);
  EXPECT_THAT(shape.err, HasSubstr("takes input FP32 [-1, 4]; 1 images are FP32 [1, 784]"));
  EXPECT_EQ(
      RunOnServer({"evaluate", "nothing", "--images", images, "--labels", WriteLabels("abc")}).code,
      kExitFailure);
}

}  // namespace
}  // namespace espalier::cli
