// Weights in files beside the model: they must stay in its folder and be as long as the model says.
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "engine/formats/names.h"
#include "engine/formats/reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/formats/onnx_builder.h"

namespace espalier::formats {
namespace {

using absl::StatusCode;
using espalier::testing::Elements;
using espalier::testing::ExpectRefused;
using espalier::testing::Read;
using espalier::testing::SetExternal;
using espalier::testing::SmallModel;
using espalier::testing::TemporaryFolder;
using ::testing::ElementsAre;

const std::vector<float> kWeights = {1, 0, 2, 0, 3, 0};

std::string Bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

// The small model, its weight at `entries`.
onnx::ModelProto ExternalModel(std::initializer_list<std::pair<const char*, std::string>> entries) {
  onnx::ModelProto model = SmallModel();
  SetExternal(*model.mutable_graph()->mutable_initializer(0), entries);
  return model;
}

class OnnxExternalDataTest : public ::testing::Test {
 protected:
  void ExpectWeights(const onnx::ModelProto& model) {
    const auto graph = Read(model, folder_.path());
    ASSERT_TRUE(graph.ok()) << graph.status();
    EXPECT_EQ(Elements<float>(graph->initializers.at("w")), kWeights);
  }
  void ExpectInvalid(const onnx::ModelProto& model, std::vector<std::string> parts) {
    parts.push_back("m.onnx: initializer 'w': external data");
    ExpectRefused(Read(model, folder_.path()).status(), StatusCode::kInvalidArgument, parts);
  }
  TemporaryFolder folder_;
};

TEST_F(OnnxExternalDataTest, AWholeFileOrARangeOfItIsRead) {
  folder_.Write("w.bin", Bytes(kWeights));
  ExpectWeights(ExternalModel({{"location", "w.bin"}}));
  ExpectWeights(
      ExternalModel({{"location", "./w.bin"}, {"length", "24"}, {"checksum", "ignored"}}));
  folder_.Write("data/all.bin", "12345678" + Bytes(kWeights) + "12345678");
  ExpectWeights(ExternalModel({{"location", "data/all.bin"}, {"offset", "8"}, {"length", "24"}}));
}

TEST_F(OnnxExternalDataTest, ItIsFoundBesideTheModelFile) {
  folder_.Write("1/w.bin", Bytes(kWeights));
  const std::string path =
      folder_.Write("1/model.onnx", ExternalModel({{"location", "w.bin"}}).SerializeAsString());
  const auto graph = ReadModel(path);
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(Elements<float>(graph->initializers.at("w")), kWeights);
}

TEST_F(OnnxExternalDataTest, ASparseTensorMayLieOutsideToo) {
  folder_.Write("values.bin", Bytes({1, 2, 3}));
  onnx::ModelProto model = SmallModel();
  model.mutable_graph()->mutable_initializer()->DeleteSubrange(0, 1);
  auto& sparse = *model.mutable_graph()->add_sparse_initializer() =
      espalier::testing::MakeSparse("w", {2, 3}, {1, 2, 3}, {3}, {0, 2, 4});
  SetExternal(*sparse.mutable_values(), {{"location", "values.bin"}});
  ExpectWeights(model);
}

TEST_F(OnnxExternalDataTest, PathsThatClimbOutOfTheFolderAreRefused) {
  folder_.Write("w.bin", Bytes(kWeights));
  folder_.Write("model/x", "");
  const std::string inner = folder_.path() + "/model";
  const auto climb = [&](const std::string& location) {
    ExpectRefused(Read(ExternalModel({{"location", location}}), inner).status(),
                  StatusCode::kInvalidArgument,
                  {"initializer 'w': external data", "below the model's folder"});
  };
  climb("../w.bin");
  climb(folder_.path() + "/w.bin");
  climb("a/../../w.bin");
  climb("..");
  climb(".");
  climb("a//b");
  climb("w.bin/");
  climb(std::string("w\0.bin", 6));
}

TEST_F(OnnxExternalDataTest, LinksMayLeadAroundInTheFolderButNotOutOfIt) {
  folder_.Write("outside.bin", Bytes(kWeights));
  folder_.Write("model/..data/w.bin", Bytes(kWeights));
  const std::string inner = folder_.path() + "/model";
  std::filesystem::create_symlink("..data/w.bin",
                                  inner + "/w.bin");  // as in a mounted Kubernetes volume
  std::filesystem::create_symlink("../outside.bin", inner + "/out.bin");
  std::filesystem::create_symlink(folder_.path(), inner + "/dir");
  const auto inside = Read(ExternalModel({{"location", "w.bin"}}), inner);
  ASSERT_TRUE(inside.ok()) << inside.status();
  EXPECT_EQ(Elements<float>(inside->initializers.at("w")), kWeights);
  for (const char* location : {"out.bin", "dir/outside.bin"}) {
    ExpectRefused(Read(ExternalModel({{"location", location}}), inner).status(),
                  StatusCode::kInvalidArgument,
                  {"leads out of the model's folder by a symbolic link"});
  }
}

TEST_F(OnnxExternalDataTest, SizesThatDoNotFitAreRefusedWithBoth) {
  folder_.Write("w.bin", Bytes(kWeights));
  ExpectInvalid(ExternalModel({{"location", "w.bin"}, {"length", "20"}}),
                {"FP32 [2, 3]", "has 20 bytes, expected 24"});
  ExpectInvalid(ExternalModel({{"location", "w.bin"}, {"offset", "4"}}),
                {"has 20 bytes, expected 24"});
  ExpectInvalid(ExternalModel({{"location", "w.bin"}, {"offset", "4"}, {"length", "24"}}),
                {"after offset 4 has 20 bytes, expected 24"});
  ExpectInvalid(ExternalModel({{"location", "w.bin"}, {"offset", "25"}}),
                {"has 24 bytes, expected 25"});
  onnx::ModelProto huge = ExternalModel({{"location", "w.bin"}});
  huge.mutable_graph()->mutable_initializer(0)->set_dims(0, int64_t{1} << 50);
  ExpectInvalid(huge, {"has 24 bytes, expected 13510798882111488"});
}

TEST_F(OnnxExternalDataTest, EntriesThatAreNoCountsOrMissingAreRefused) {
  folder_.Write("w.bin", Bytes(kWeights));
  ExpectInvalid(ExternalModel({{"offset", "0"}}), {"no location"});
  ExpectInvalid(ExternalModel({{"location", "w.bin"}, {"offset", "-1"}}),
                {"offset is '-1', expected a count"});
  ExpectInvalid(ExternalModel({{"location", "w.bin"}, {"length", "1e3"}}), {"length is '1e3'"});
  ExpectInvalid(ExternalModel({{"location", "w.bin"}, {"length", "99999999999999999999"}}),
                {"length is '999"});
  ExpectInvalid(ExternalModel({{"location", "w.bin"}, {"location", "v.bin"}}),
                {"'location' is given twice"});
}

TEST_F(OnnxExternalDataTest, TwoSourcesAreRefused) {
  folder_.Write("w.bin", Bytes(kWeights));
  onnx::ModelProto model = ExternalModel({{"location", "w.bin"}});
  model.mutable_graph()->mutable_initializer(0)->set_raw_data(Bytes(kWeights));
  ExpectRefused(Read(model, folder_.path()).status(), StatusCode::kInvalidArgument,
                {"stores both external data and raw_data"});
  model.mutable_graph()->mutable_initializer(0)->clear_raw_data();
  model.mutable_graph()->mutable_initializer(0)->add_int32_data(1);
  ExpectRefused(Read(model, folder_.path()).status(), StatusCode::kInvalidArgument,
                {"stores both external data and int32_data"});
}

TEST_F(OnnxExternalDataTest, FilesThatAreMissingOrNoFilesAreRefused) {
  ExpectRefused(Read(ExternalModel({{"location", "none.bin"}}), folder_.path()).status(),
                StatusCode::kNotFound, {"external data 'none.bin'", "cannot open"});
  ASSERT_EQ(mkfifo((folder_.path() + "/fifo").c_str(), 0600), 0);
  ExpectInvalid(ExternalModel({{"location", "fifo"}}), {"is a FIFO, expected a regular file"});
  folder_.Write("folder/x", "");
  ExpectInvalid(ExternalModel({{"location", "folder"}}), {"is a directory"});
  ExpectRefused(Read(ExternalModel({{"location", "w.bin"}})).status(), StatusCode::kInvalidArgument,
                {"was not read from a folder"});
}

TEST_F(OnnxExternalDataTest, MessagesStayUtf8AndShortWhateverTheLocationIs) {
  const auto message = [&](const std::string& location) {
    return std::string(
        Read(ExternalModel({{"location", location}}), folder_.path()).status().message());
  };
  EXPECT_THAT(message("w.bi\x9a"), ::testing::HasSubstr("w.bi\\x9a"));
  EXPECT_TRUE(IsUtf8(message("w.bi\x9a")));
  EXPECT_LT(message(std::string(100000, 'w')).size(), 1000u);
}

TEST_F(OnnxExternalDataTest, LimitsHold) {
  folder_.Write("w.bin", Bytes(kWeights));
  ReadLimits limits;
  limits.max_tensor_bytes = 23;
  ExpectRefused(Read(ExternalModel({{"location", "w.bin"}}), folder_.path(), limits).status(),
                StatusCode::kResourceExhausted,
                {"initializer 'w'", "24 bytes, the limit for one constant is 23"});
}

}  // namespace
}  // namespace espalier::formats
