// Two checkpoints to a delta and back, byte for byte: safetensors, folders, ONNX in every way it
// stores weights.
#include "engine/updates/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "engine/updates/apply_delta.h"
#include "engine/updates/create_delta.h"
#include "engine/updates/journal.h"
#include "engine/updates/weight_digest.h"
#include "tests/engine/formats/onnx_builder.h"
#include "tests/engine/updates/random_weights.h"

namespace espalier::updates {
namespace {

namespace fs = std::filesystem;
using espalier::testing::AddNode;
using espalier::testing::ExpectRefused;
using espalier::testing::MakeRaw;
using espalier::testing::MakeSparse;
using espalier::testing::MakeTensor;
using espalier::testing::SetExternal;
using espalier::testing::SmallModel;
using espalier::testing::TemporaryFolder;
using onnx::TensorProto;
using testing::MakePair;

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

struct StTensor {
  std::string name, dtype, shape, bytes;
};

std::string Safetensors(const std::vector<StTensor>& tensors, const std::string& metadata = "") {
  std::string json = "{" + metadata, data;
  for (const StTensor& tensor : tensors) {
    json += (json.size() > 1 ? ",\"" : "\"") + tensor.name + R"(":{"dtype":")" + tensor.dtype +
            R"(","shape":[)" + tensor.shape + R"(],"data_offsets":[)" +
            std::to_string(data.size()) + "," + std::to_string(data.size() + tensor.bytes.size()) +
            "]}";
    data += tensor.bytes;
  }
  json += "}";
  std::string file;
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<char>(json.size() >> (8 * i)));
  return file + json + data;
}

template <typename Bits>
std::string BytesOf(const std::vector<Bits>& elements) {
  return {reinterpret_cast<const char*>(elements.data()), elements.size() * sizeof(Bits)};
}

class CheckpointTest : public ::testing::Test {
 protected:
  std::string At(const std::string& name) const { return folder_.path() + "/" + name; }

  absl::StatusOr<Manifest> Create(const std::string& before, const std::string& after,
                                  const std::string& out) {
    const auto from = Checkpoint::Open(before);
    if (!from.ok()) return from.status();
    const auto to = Checkpoint::Open(after);
    if (!to.ok()) return to.status();
    CreateOptions options;
    options.model = "m";
    options.target_version = 1;
    options.weights.threads = 2;
    return CreateDelta(**from, **to, out, options);
  }

  static DeltaFile OpenDelta(const std::string& path) {
    return DeltaFile::Open(std::make_shared<FileSource>(formats::RegularFile::Open(path).value()))
        .value();
  }

  absl::Status Apply(const std::string& base, const std::string& delta, const std::string& out) {
    const auto from = Checkpoint::Open(base);
    if (!from.ok()) return from.status();
    return ApplyDelta(**from, OpenDelta(delta), out);
  }

  // Create, apply, compare; the journal leads to the same weights. Returns the manifest.
  Manifest ExpectRoundTrip(const std::string& before, const std::string& after) {
    const std::string delta = At("d.espd"), out = At("out" + fs::path(before).extension().string());
    fs::remove_all(out);
    const auto manifest = Create(before, after, delta);
    EXPECT_TRUE(manifest.ok()) << manifest.status();
    if (!manifest.ok()) return {};
    const auto applied = Apply(before, delta, out);
    EXPECT_TRUE(applied.ok()) << applied;
    if (fs::is_directory(out)) {
      for (const auto& entry : fs::directory_iterator(after)) {
        if (!entry.is_regular_file() || entry.path().filename().string()[0] == '.') continue;
        EXPECT_EQ(Contents(out + "/" + entry.path().filename().string()), Contents(entry.path()));
      }
    } else {
      EXPECT_EQ(Contents(out), Contents(after));
    }
    const auto base = Checkpoint::Open(before).value();
    EXPECT_TRUE(CheckTarget(OpenDelta(delta), *base).ok());
    const auto journal = DecodeJournal(OpenDelta(delta), *base);
    EXPECT_TRUE(journal.ok()) << journal.status();
    // Nothing is left beside the results.
    for (const auto& entry : fs::directory_iterator(folder_.path()))
      EXPECT_EQ(entry.path().string().find(".tmp-"), std::string::npos) << entry.path();
    return *manifest;
  }

  TemporaryFolder folder_;
};

TEST_F(CheckpointTest, SafetensorsComeBackWithEveryDtypeAndOtherMetadata) {
  const auto f32 = MakePair<Float32Element>(600, 1);
  const auto bf16 = MakePair<BFloat16Element>(5000, 2);
  const auto f16 = MakePair<Float16Element>(30, 3);
  const auto bytes = MakePair<ByteElement>(64, 4);
  const auto file = [&](bool after) {
    return Safetensors(
        {{"z", "F32", "20,30", BytesOf(after ? f32.after : f32.before)},
         {"a", "BF16", "5000", BytesOf(after ? bf16.after : bf16.before)},
         {"h", "F16", "30", BytesOf(after ? f16.after : f16.before)},
         {"i", "I64", "8", BytesOf(after ? bytes.after : bytes.before)},
         {"empty", "F32", "0", ""},
         {"unchanged", "F64", "1", std::string(8, 'u')}},
        after ? R"("__metadata__":{"step":"200"})" : R"("__metadata__":{"step":"1"})");
  };
  folder_.Write("old.safetensors", file(false));
  folder_.Write("new.safetensors", file(true));
  const Manifest manifest = ExpectRoundTrip(At("old.safetensors"), At("new.safetensors"));
  EXPECT_EQ(manifest.tensors.size(), 4u);
  EXPECT_FALSE(manifest.schema_changes);
}

TEST_F(CheckpointTest, NothingChangedIsAlmostNothing) {
  const auto pair = MakePair<Float32Element>(100'000, 1);
  folder_.Write("old.safetensors", Safetensors({{"w", "F32", "100000", BytesOf(pair.before)}}));
  const Manifest manifest = ExpectRoundTrip(At("old.safetensors"), At("old.safetensors"));
  EXPECT_EQ(manifest.rest_bytes, 0u);
  EXPECT_LT(fs::file_size(At("d.espd")), 300u);
}

TEST_F(CheckpointTest, FoldersComeBackWithAllTheirFiles) {
  const auto a = MakePair<BFloat16Element>(3000, 5), b = MakePair<BFloat16Element>(2000, 6);
  const auto write = [&](const std::string& name, bool after) {
    folder_.Write(name + "/model-1.safetensors",
                  Safetensors({{"a", "BF16", "3000", BytesOf(after ? a.after : a.before)}}));
    folder_.Write(name + "/model-2.safetensors",
                  Safetensors({{"b", "BF16", "2000", BytesOf(after ? b.after : b.before)}}));
    folder_.Write(name + "/model.safetensors.index.json",
                  R"({"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}})");
    folder_.Write(name + "/config.json", after ? R"({"step":2})" : R"({"step":1})");
    folder_.Write(name + "/.hidden", after ? "x" : "y");
    folder_.Write(name + "/sub/ignored", "z");
  };
  write("old", false);
  write("new", true);
  folder_.Write("new/added.txt", "a file that the old one has not");
  ExpectRoundTrip(At("old"), At("new"));
  ExpectRoundTrip(At("new"), At("old"));
}

TEST_F(CheckpointTest, TensorsThatWereRenamedOrTurnedAreRecognised) {
  const auto pair = MakePair<Float32Element>(60 * 50, 7, {.zeros = 0});
  std::vector<uint32_t> turned(pair.before.size());
  for (size_t r = 0; r < 60; ++r)
    for (size_t c = 0; c < 50; ++c) turned[c * 60 + r] = pair.before[r * 50 + c];
  folder_.Write("old.safetensors", Safetensors({{"w", "F32", "60,50", BytesOf(pair.before)}}));
  folder_.Write("renamed.safetensors",
                Safetensors({{"fc.weight", "F32", "60,50", BytesOf(pair.before)}}));
  folder_.Write("turned.safetensors", Safetensors({{"wT", "F32", "50,60", BytesOf(turned)}}));
  for (const char* name : {"renamed.safetensors", "turned.safetensors"}) {
    const Manifest manifest = ExpectRoundTrip(At("old.safetensors"), At(name));
    EXPECT_TRUE(manifest.schema_changes);
    EXPECT_LT(fs::file_size(At("d.espd")), 450u) << "12,000 bytes of weights are not sent again";
  }
}

TEST_F(CheckpointTest, AddedRemovedAndReshapedTensorsComeBack) {
  const auto pair = MakePair<Float32Element>(100, 8);
  folder_.Write("old.safetensors", Safetensors({{"a", "F32", "100", BytesOf(pair.before)},
                                                {"b", "F32", "10,10", BytesOf(pair.before)}}));
  folder_.Write("new.safetensors", Safetensors({{"b", "F32", "5,20", BytesOf(pair.after)},
                                                {"c", "BF16", "200", BytesOf(pair.after)}}));
  EXPECT_TRUE(ExpectRoundTrip(At("old.safetensors"), At("new.safetensors")).schema_changes);
}

// --- ONNX -----------------------------------------------------------------------------------------

// SmallModel with w sparse (the given indices' form), b in float_data, and one initializer each in
// raw FLOAT16, INT64, int32_data FLOAT16 and external data.
onnx::ModelProto RichModel(const std::vector<float>& values, const std::vector<int64_t>& indices,
                           bool tuples, bool raw_indices, float b0, uint16_t half) {
  onnx::ModelProto model = SmallModel();
  auto& graph = *model.mutable_graph();
  graph.mutable_initializer()->DeleteSubrange(0, 1);
  const auto count = static_cast<int64_t>(values.size());
  std::vector<int64_t> flat = indices, shape = {count};
  if (tuples) {
    shape.push_back(2);
    flat.clear();
    for (const int64_t index : indices) flat.insert(flat.end(), {index / 3, index % 3});
  }
  auto sparse = MakeSparse("w", {2, 3}, values, shape, flat);
  if (raw_indices) {
    sparse.mutable_indices()->clear_int64_data();
    sparse.mutable_indices()->set_raw_data(flat.data(), flat.size() * 8);
  }
  *graph.add_sparse_initializer() = sparse;
  graph.mutable_initializer(0)->set_float_data(0, b0);
  *graph.add_initializer() = MakeRaw<uint16_t>("half", TensorProto::FLOAT16, {2}, {half, 0});
  *graph.add_initializer() = MakeRaw<int64_t>("count", TensorProto::INT64, {2}, {half, 7});
  auto& typed = *graph.add_initializer() = MakeTensor("typed", TensorProto::FLOAT16, {1});
  typed.add_int32_data(half);
  return model;
}

TEST_F(CheckpointTest, OnnxComesBackInEveryWayItStoresWeights) {
  for (const bool tuples : {false, true}) {
    for (const bool raw : {false, true}) {
      SCOPED_TRACE(tuples * 2 + raw);
      folder_.Write("old.onnx",
                    RichModel({1, 2, 3}, {0, 2, 4}, tuples, raw, 4, 0x3c00).SerializeAsString());
      // A value changes, one is dropped, two are grown; other initializers change too.
      folder_.Write(
          "new.onnx",
          RichModel({1.5f, 9, 8, 3}, {0, 1, 3, 4}, tuples, raw, 4.5f, 0x3c01).SerializeAsString());
      const Manifest manifest = ExpectRoundTrip(At("old.onnx"), At("new.onnx"));
      ASSERT_EQ(manifest.tensors.size(), 4u);  // b, count, half, w
      EXPECT_EQ(manifest.tensors[3].tensor.ToString(), "w F32 [2, 3]");
      EXPECT_EQ(manifest.tensors[3].counts, (EventCounts{{1, 1, 2, 0}}));
      EXPECT_FALSE(manifest.schema_changes);
      ExpectRoundTrip(At("new.onnx"), At("old.onnx"));
    }
  }
}

TEST_F(CheckpointTest, SparseInitializersThatStoreZerosComeBackToo) {
  folder_.Write("old.onnx",
                RichModel({1, 0, 3}, {0, 2, 4}, false, false, 4, 1).SerializeAsString());
  folder_.Write("new.onnx",
                RichModel({1, -0.0f, 3}, {0, 2, 4}, false, false, 4, 1).SerializeAsString());
  ExpectRoundTrip(At("old.onnx"), At("new.onnx"));
}

TEST_F(CheckpointTest, ExternalDataComesBackInAFolder) {
  const auto write = [&](const std::string& name, float value) {
    onnx::ModelProto model = SmallModel();
    auto& w = *model.mutable_graph()->mutable_initializer(0);
    w.clear_raw_data();
    SetExternal(w, {{"location", "w.bin"}, {"offset", "8"}, {"length", "24"}});
    folder_.Write(name + "/model.onnx", model.SerializeAsString());
    const std::vector<float> values = {value, 0, 2, 0, 3, 0};
    folder_.Write(
        name + "/w.bin",
        "padding." + std::string(reinterpret_cast<const char*>(values.data()), 24) + "tail");
  };
  write("old", 1);
  write("new", 1.25f);
  const auto manifest = Create(At("old/model.onnx"), At("new/model.onnx"), At("d.espd"));
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  ASSERT_TRUE(Apply(At("old/model.onnx"), At("d.espd"), At("out")).ok());
  for (const char* name : {"model.onnx", "w.bin"})
    EXPECT_EQ(Contents(At("out/") + name), Contents(At("new/") + name));
}

TEST_F(CheckpointTest, RenamedValuesAndNodesAreTheSameGraph) {
  onnx::ModelProto model = SmallModel();
  folder_.Write("old.onnx", model.SerializeAsString());
  auto& graph = *model.mutable_graph();
  graph.mutable_node(0)->set_name("other");
  graph.mutable_node(0)->set_input(1, "onnx::MatMul_17");
  graph.mutable_initializer(0)->set_name("onnx::MatMul_17");
  graph.mutable_node(0)->set_output(0, "v");
  graph.mutable_node(1)->set_input(0, "v");
  std::string& raw = *graph.mutable_initializer(0)->mutable_raw_data();
  raw[0] = 1;  // the weight changes as well, so that equal contents cannot tell
  folder_.Write("new.onnx", model.SerializeAsString());
  const Manifest manifest = ExpectRoundTrip(At("old.onnx"), At("new.onnx"));
  ASSERT_EQ(manifest.tensors.size(), 1u);
  EXPECT_EQ(manifest.tensors[0].tensor.name, "w");
}

TEST_F(CheckpointTest, GraphsThatDifferAreRefusedNamingTheDifference) {
  folder_.Write("old.onnx", SmallModel().SerializeAsString());
  const auto refused = [&](const std::function<void(onnx::ModelProto&)>& change,
                           const std::string& reason) {
    onnx::ModelProto model = SmallModel();
    change(model);
    folder_.Write("new.onnx", model.SerializeAsString());
    const auto manifest = Create(At("old.onnx"), At("new.onnx"), At("d.espd"));
    ASSERT_FALSE(manifest.ok()) << reason;
    ExpectRefused(manifest.status(), absl::StatusCode::kInvalidArgument, {reason});
    EXPECT_FALSE(fs::exists(At("d.espd")));
  };
  refused([](auto& m) { m.mutable_graph()->mutable_node(1)->set_op_type("Sigmoid"); },
          "node 1 'relu' (Sigmoid) is the op 'Sigmoid', was 'Relu'");
  refused([](auto& m) { m.mutable_graph()->mutable_node(0)->mutable_attribute(0)->set_i(0); },
          "node 0 'fc' (Gemm) attribute 'transB' is ");
  refused([](auto& m) { m.mutable_graph()->mutable_node(1)->set_input(0, "x"); },
          "takes or gives other values");
  refused([](auto& m) { AddNode(m, "more", "Relu", {"y"}, {"z"}); }, "has 3 nodes, had 2");
  refused([](auto& m) { m.mutable_opset_import(0)->set_version(12); }, "opset");
  refused([](auto& m) { m.mutable_graph()->mutable_output(0)->set_name("q"); }, "output");
  refused(
      [](auto& m) {
        auto& w = *m.mutable_graph()->mutable_initializer(0);
        w.set_dims(0, 3);
        w.set_dims(1, 2);
      },
      "weight w F32 [3, 2] was w F32 [2, 3]");
}

TEST_F(CheckpointTest, TwoFormatsAreNotCompared) {
  folder_.Write("old.onnx", SmallModel().SerializeAsString());
  folder_.Write("new.safetensors", Safetensors({}));
  ExpectRefused(Create(At("old.onnx"), At("new.safetensors"), At("d.espd")).status(),
                absl::StatusCode::kInvalidArgument, {"two formats"});
}

// --- applying -------------------------------------------------------------------------------------

TEST_F(CheckpointTest, ApplyingToAnotherBaseOrOverAFileLeavesEverythingAsItWas) {
  const auto pair = MakePair<Float32Element>(100, 9);
  folder_.Write("old.safetensors", Safetensors({{"w", "F32", "100", BytesOf(pair.before)}}));
  folder_.Write("new.safetensors", Safetensors({{"w", "F32", "100", BytesOf(pair.after)}}));
  ASSERT_TRUE(Create(At("old.safetensors"), At("new.safetensors"), At("d.espd")).ok());
  ExpectRefused(Apply(At("new.safetensors"), At("d.espd"), At("out.safetensors")),
                absl::StatusCode::kFailedPrecondition, {"applied already"});
  EXPECT_FALSE(fs::exists(At("out.safetensors")));
  folder_.Write("out.safetensors", "precious");
  ExpectRefused(Apply(At("old.safetensors"), At("d.espd"), At("out.safetensors")),
                absl::StatusCode::kAlreadyExists, {"exists already"});
  EXPECT_EQ(Contents(At("out.safetensors")), "precious");
}

TEST_F(CheckpointTest, AChainComposedIsTheDirectDelta) {
  std::mt19937_64 random(3);
  auto weights = MakePair<BFloat16Element>(4000, 10, {.zeros = 0.7}).before;
  std::vector<std::string> deltas;
  const auto save = [&](int step) {
    const std::string name = "step" + std::to_string(step) + ".safetensors";
    folder_.Write(name, Safetensors({{"w", "BF16", "40,100", BytesOf(weights)}}));
    return At(name);
  };
  std::string last = save(0);
  const std::string first = last;
  for (int step = 1; step <= 5; ++step) {
    for (int i = 0; i < 50; ++i) {
      auto& bits = weights[random() % weights.size()];
      bits = random() % 3 == 0 ? 0 : static_cast<uint16_t>(bits + 1);
    }
    const std::string next = save(step);
    deltas.push_back(At("d" + std::to_string(step) + ".espd"));
    ASSERT_TRUE(Create(last, next, deltas.back()).ok());
    last = next;
  }
  CreateOptions options;
  const auto manifest = ComposeDeltas(first, deltas, At("all.espd"), options);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(manifest->model, "m");
  ASSERT_TRUE(Apply(first, At("all.espd"), At("end.safetensors")).ok());
  EXPECT_EQ(Contents(At("end.safetensors")), Contents(last));
  ASSERT_TRUE(Create(first, last, At("direct.espd")).ok());
  EXPECT_EQ(OpenDelta(At("all.espd")).manifest().tensors,
            OpenDelta(At("direct.espd")).manifest().tensors);
  std::reverse(deltas.begin(), deltas.end());
  ExpectRefused(ComposeDeltas(first, deltas, At("bad.espd"), options).status(),
                absl::StatusCode::kFailedPrecondition, {"d5.espd", "made for"});
}

TEST_F(CheckpointTest, FilesThatAreNotWhatTheySayAreRefused) {
  folder_.Write("a/one.safetensors", Safetensors({{"w", "U8", "1", "x"}}));
  folder_.Write("a/two.safetensors", Safetensors({{"w", "U8", "1", "x"}}));
  ExpectRefused(Checkpoint::Open(At("a")).status(), absl::StatusCode::kInvalidArgument,
                {"'w' is in 'one.safetensors' and in 'two.safetensors'"});
  folder_.Write("b/one.safetensors", Safetensors({{"w", "U8", "1", "x"}}));
  folder_.Write("b/model.safetensors.index.json", R"({"weight_map":{"w":"two.safetensors"}})");
  ExpectRefused(Checkpoint::Open(At("b")).status(), absl::StatusCode::kInvalidArgument,
                {"the index says 'two.safetensors'"});
  folder_.Write("b/model.safetensors.index.json",
                R"({"weight_map":{"w":"one.safetensors","v":"one.safetensors"}})");
  ExpectRefused(Checkpoint::Open(At("b")).status(), absl::StatusCode::kInvalidArgument,
                {"the tensor 'v'"});
  folder_.Write("c/readme", "nothing");
  ExpectRefused(Checkpoint::Open(At("c")).status(), absl::StatusCode::kInvalidArgument,
                {"has no .safetensors file"});
  EXPECT_EQ(Checkpoint::Open(At("missing.onnx")).status().code(), absl::StatusCode::kNotFound);
}

// --- skeletons of strangers -------------------------------------------------------------------------

TEST(SkeletonTest, PathsHolesAndNumbersAreChecked) {
  const std::vector<TensorInfo> tensors = {{"m", "F32", {2, 3}, 24}, {"v", "I8", {4}, 4}};
  const auto file = [](const std::string& name, const std::string& holes,
                       const std::string& bytes) {
    return std::string(1, static_cast<char>(name.size())) + name + holes +
           std::string(1, static_cast<char>(bytes.size())) + bytes;
  };
  const auto parse = [&](const std::string& text) { return ParseSkeleton(text, tensors); };
  const std::string none(1, '\0');
  EXPECT_TRUE(parse("\1\1" + file("m", std::string("\2\1\0\0\0\1\0", 7), "xy")).ok());
  for (const char* name : {"..", ".", "a/b", "/x", "", "a\nb"}) {
    ExpectRefused(parse("\1\1" + file(name, none, "")).status(), absl::StatusCode::kInvalidArgument,
                  {"expected a plain name"});
  }
  const auto refused = [&](const std::string& text, const std::string& reason) {
    ExpectRefused(parse(text).status(), absl::StatusCode::kInvalidArgument, {reason});
  };
  refused("", "kind of the rest");
  refused(std::string("\1\0", 2), "no files");
  refused("\1\2" + file("a", none, "") + file("b", none, ""), "no files");
  refused(std::string("\0\2", 2) + file("b", none, "") + file("a", none, ""), "not ascending");
  refused(std::string("\0\2", 2) + file("a", none, "") + file("a", none, ""), "not ascending");
  refused("\1\1" + file("a", none, "") + "x", "expected the end");
  refused("\1\1" + file("a", std::string("\1\0\2\0", 4), ""), "tensor 2 of 2");
  refused("\1\1" + file("a", std::string("\1\0\0\6", 4), ""), "has the content 6");
  refused("\1\1" + file("a", std::string("\1\0\0\x10", 4), ""), "has the content 16");
  refused("\1\1" + file("a", std::string("\1\0\1\x08", 4), ""), "transposes what is no matrix");
  refused("\1\1" + file("a", std::string("\1\0\1\1", 4), ""), "non-zeros of bytes");
  refused("\1\1" + file("a", std::string("\1\5\0\0", 4), "xy"), "behind the end");
  refused("\1\1" + file("a", std::string("\2\0\0\0\0\0\0", 7), ""), "two holes for tensor 'm'");
  refused("\1\1" + file("a", "\x7f", ""), "");
}

}  // namespace
}  // namespace espalier::updates
