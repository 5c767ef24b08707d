#include "engine/formats/reader.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <set>
#include <thread>

#include "engine/formats/names.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/formats/onnx_builder.h"

namespace espalier::formats {
namespace {

using absl::StatusCode;
using espalier::testing::ExpectRefused;
using espalier::testing::SmallModel;
using espalier::testing::TemporaryFolder;

TEST(ReaderTest, AModelIsReadWhateverItsFileIsCalled) {
  TemporaryFolder folder;
  const std::string path = folder.Write("weights.bin", SmallModel().SerializeAsString());
  const auto graph = ReadModel(path);
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(graph->source, path);
  EXPECT_EQ(graph->nodes.size(), 2u);
}

TEST(ReaderTest, FilesThatAreNoModelAreRefusedWithTheirFirstBytes) {
  TemporaryFolder folder;
  ExpectRefused(ReadModel(folder.Write("f", "")).status(), StatusCode::kInvalidArgument,
                {"/f: expected a model in one of the formats ONNX, got an empty file"});
  ExpectRefused(ReadModel(folder.Write("f", "PK\x03\x04 a zip")).status(),
                StatusCode::kInvalidArgument, {"starts with 'PK\\x03\\x04"});
  ExpectRefused(ReadModel(folder.Write("f", "{\"model\": 1}")).status(),
                StatusCode::kInvalidArgument, {"starts with"});
}

TEST(ReaderTest, PathsThatAreNoFilesAreRefusedWithoutWaiting) {
  TemporaryFolder folder;
  const std::string fifo = folder.path() + "/model.onnx";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  ExpectRefused(ReadModel(fifo).status(), StatusCode::kInvalidArgument, {fifo, "is a FIFO"});
  ExpectRefused(ReadModel(folder.path()).status(), StatusCode::kInvalidArgument,
                {"is a directory"});
  ExpectRefused(ReadModel("/dev/zero").status(), StatusCode::kInvalidArgument, {"is a device"});
  ExpectRefused(ReadModel(folder.path() + "/none.onnx").status(), StatusCode::kNotFound,
                {"none.onnx"});
}

TEST(ReaderTest, AFileAboveTheLimitIsRefusedBeforeItIsRead) {
  TemporaryFolder folder;
  const std::string path = folder.Write("m", SmallModel().SerializeAsString());
  ReadLimits limits;
  limits.max_file_bytes = 100;
  ExpectRefused(ReadModel(path, limits).status(), StatusCode::kResourceExhausted,
                {path, "the limit is 100"});
  // 3 GiB that take no room on the disk: above what protobuf can parse.
  std::filesystem::resize_file(path, int64_t{3} << 30);
  ExpectRefused(ReadModel(path).status(), StatusCode::kResourceExhausted,
                {"3221225472 bytes, the limit is 2147483648"});
}

TEST(ReaderTest, AFileThatIsTruncatedAndWrittenWhileItIsReadIsReadOrRefused) {
  TemporaryFolder folder;
  onnx::ModelProto model = SmallModel();
  *model.mutable_graph()->add_initializer() = espalier::testing::MakeRaw<float>(
      "large", onnx::TensorProto::FLOAT, {1 << 18}, std::vector<float>(1 << 18, 1.0f));
  const std::string whole = model.SerializeAsString();
  const std::string path = folder.Write("m", whole);
  std::atomic<bool> done = false;
  std::thread writer([&] {
    while (!done) {
      std::filesystem::resize_file(path, whole.size() / 2);
      folder.Write("m", whole);
    }
  });
  for (int i = 0; i < 100; ++i) {
    const auto graph = ReadModel(path);
    EXPECT_TRUE(graph.ok() || absl::IsInvalidArgument(graph.status())) << graph.status();
  }
  done = true;
  writer.join();
  EXPECT_TRUE(ReadModel(path).ok());
}

TEST(ReaderTest, NamesAreShownShortAndEscaped) {
  EXPECT_EQ(Quoted("fc1"), "'fc1'");
  EXPECT_EQ(Quoted("a'b\n\\\t"), "'a'b\\n\\\\\\x09'");
  EXPECT_EQ(Quoted("größe"), "'größe'");
  EXPECT_EQ(Quoted("\xff"), "'\\xff'");
  EXPECT_EQ(Shown(std::string(99, 'a') + "ä" + std::string(50, 'b')),
            std::string(99, 'a') + "… (151 bytes)");
}

TEST(ReaderTest, Utf8IsToldFromWhatOnlyLooksLikeIt) {
  for (const char* good : {"", "a", "ä", "€", "😀", "\xf4\x8f\xbf\xbf"})
    EXPECT_TRUE(IsUtf8(good)) << good;
  for (const char* bad :
       {"\x80", "\xc0\x80", "\xc3", "\xe2\x82", "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80",
        "\xf5\x80\x80\x80", "\xe2\x28\xa1", "\xf0\x82\x82\xac"}) {
    EXPECT_FALSE(IsUtf8(bad));
  }
}

// The shipped models, as they are.
TEST(ShippedModelsTest, AreAllRead) {
  const std::filesystem::path repository = "tests/data/models";
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(repository)) {
    const auto path = entry.path() / "1" / "model.onnx";
    if (!std::filesystem::exists(path)) continue;
    names.insert(entry.path().filename().string());
    const auto graph = ReadModel(path.string());
    ASSERT_TRUE(graph.ok()) << graph.status();
    ASSERT_EQ(graph->inputs.size(), 1u) << path;
    EXPECT_EQ(graph->inputs[0].dtype, DType::kFloat32);
    EXPECT_THAT(graph->inputs[0].shape, ::testing::ElementsAre(kBatch, 784));
    ASSERT_EQ(graph->outputs.size(), 1u) << path;
    EXPECT_THAT(graph->outputs[0].shape, ::testing::ElementsAre(kBatch, 10));
    EXPECT_EQ(std::count_if(graph->nodes.begin(), graph->nodes.end(),
                            [](const Node& node) { return node.op_type == "Gemm"; }),
              3);
    // The first weight is read whole: a sparse model's is mostly zeros, a dense one's is not, and no zero is negative.
    const Tensor& weight = graph->initializers.at(graph->nodes[0].inputs[1]);
    EXPECT_THAT(weight.shape(), ::testing::ElementsAre(512, 784));
    const auto values = espalier::testing::Elements<float>(weight);
    const double zeros = static_cast<double>(std::count(values.begin(), values.end(), 0.0f));
    const double sparsity = zeros / static_cast<double>(values.size());
    const bool is_dense = entry.path().filename().string().find("dense") != std::string::npos;
    EXPECT_EQ(sparsity < 0.5, is_dense) << path << " has the sparsity " << sparsity;
    if (!is_dense) {
      EXPECT_GT(sparsity, 0.85) << path;
      EXPECT_LT(sparsity, 0.97) << path;
    }
  }
  EXPECT_GE(names.size(), 5u) << "found " << ::testing::PrintToString(names);
}

}  // namespace
}  // namespace espalier::formats
