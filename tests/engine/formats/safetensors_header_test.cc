#include "engine/formats/safetensors_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/engine/formats/onnx_builder.h"

namespace espalier::formats {
namespace {

using espalier::testing::ExpectRefused;
using espalier::testing::TemporaryFolder;

std::string File(const std::string& json, size_t data_bytes) {
  std::string file;
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<char>(json.size() >> (8 * i)));
  return file + json + std::string(data_bytes, 'd');
}

absl::StatusOr<SafetensorsHeader> Read(const std::string& contents) {
  const TemporaryFolder folder;
  const auto file = RegularFile::Open(folder.Write("x.safetensors", contents));
  return ReadSafetensorsHeader(*file);
}

void ExpectHeaderRefused(const std::string& json, size_t data_bytes, const std::string& reason) {
  SCOPED_TRACE(json);
  const auto header = Read(File(json, data_bytes));
  ASSERT_FALSE(header.ok());
  ExpectRefused(header.status(), absl::StatusCode::kInvalidArgument, {reason});
}

TEST(SafetensorsHeaderTest, TensorsComeInOrderOfTheirBytes) {
  const std::string json = R"({"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
                           R"("__metadata__":{"format":"pt","k\u00e9y\n":"\ud83d\ude00"},)"
                           R"("a":{"data_offsets":[0,4],"dtype":"F32","shape":[]},)"
                           R"("none":{"dtype":"I64","shape":[0,7],"data_offsets":[16,16]}}   )";
  const auto header = Read(File(json, 16));
  ASSERT_TRUE(header.ok()) << header.status();
  const uint64_t data = 8 + json.size();
  EXPECT_EQ(header->tensors,
            (std::vector<SafetensorsTensor>{{"a", "F32", {}, data, 4},
                                            {"b", "BF16", {2, 3}, data + 4, 12},
                                            {"none", "I64", {0, 7}, data + 16, 0}}));
  EXPECT_EQ(header->metadata.at("format"), "pt");
  EXPECT_EQ(header->metadata.at("k\u00e9y\n"), "\U0001F600");
  EXPECT_TRUE(Read(File("{}", 0)).ok());
}

TEST(SafetensorsHeaderTest, SubByteTypesCountInBits) {
  EXPECT_TRUE(Read(File(R"({"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}})", 2)).ok());
  ExpectHeaderRefused(R"({"x":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", 2, "12 bits");
}

TEST(SafetensorsHeaderTest, SizesThatLieAreRefused) {
  const auto refused = [](const std::string& contents, const std::string& reason) {
    const auto header = Read(contents);
    ASSERT_FALSE(header.ok());
    ExpectRefused(header.status(), absl::StatusCode::kInvalidArgument, {reason});
  };
  refused("", "at least 8");
  refused("1234567", "at least 8");
  refused(std::string(8, '\xff'), "the header has 18446744073709551615 bytes");
  refused(std::string("\x01\xe1\xf5\x05\0\0\0\0", 8) + std::string(100, '{'), "at most 100");
  refused(std::string("\3\0\0\0\0\0\0\0{}", 10), "the header has 3 bytes");
}

TEST(SafetensorsHeaderTest, TextThatIsNoHeaderIsRefused) {
  ExpectHeaderRefused(" {}", 0, "does not begin with '{'");
  ExpectHeaderRefused("[]", 0, "does not begin with '{'");
  ExpectHeaderRefused("", 0, "does not begin with '{'");
  ExpectHeaderRefused("{} x", 0, "expected the end");
  ExpectHeaderRefused("{}{}", 0, "expected the end");
  ExpectHeaderRefused(std::string("{}\0", 3), 0, "expected the end");
  ExpectHeaderRefused("{\"\xff\":1}", 0, "not UTF-8");
  ExpectHeaderRefused("{", 0, "expected a string");
  ExpectHeaderRefused(R"({"x")", 0, "expected ':'");
  ExpectHeaderRefused(R"({"x":1})", 0, "expected an object");
  ExpectHeaderRefused(R"({"x":{},})", 0, "fields");
  ExpectHeaderRefused(R"({"\ud800":{}})", 0, "surrogate");
  ExpectHeaderRefused("{\"a\nb\":{}}", 0, "control character");
  ExpectHeaderRefused(R"({"a\nb":{}})", 0, "tensor");
  ExpectHeaderRefused(R"({"__metadata__":{"a":1}})", 0, "expected a string");
}

TEST(SafetensorsHeaderTest, DuplicateKeysAreRefusedAtEveryLevel) {
  const std::string x = R"("x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  ExpectHeaderRefused("{" + x + "," + x + "}", 1, "the key 'x' once");
  ExpectHeaderRefused(R"({"x":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1,
                      "the key 'dtype' once");
  ExpectHeaderRefused(R"({"__metadata__":{"a":"b","a":"c"}})", 0, "the key 'a' once");
  ExpectHeaderRefused(R"({"__metadata__":{},"__metadata__":{}})", 0, "'__metadata__' once");
}

TEST(SafetensorsHeaderTest, TensorsThatAreNotWhatTheySayAreRefused) {
  const auto tensor = [](const std::string& fields) { return R"({"x":{)" + fields + "}}"; };
  ExpectHeaderRefused(tensor(R"("dtype":"U8","shape":[1])"), 1, "has 2 fields");
  ExpectHeaderRefused(tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1)"), 1,
                      "the field 'more'");
  ExpectHeaderRefused(tensor(R"("dtype":"F128","shape":[1],"data_offsets":[0,16])"), 16,
                      "unknown dtype");
  ExpectHeaderRefused(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), 4, "64 bits");
  ExpectHeaderRefused(tensor(R"("dtype":"U8","shape":[-1],"data_offsets":[0,1])"), 1, "a count");
  ExpectHeaderRefused(tensor(R"("dtype":"U8","shape":[1.0],"data_offsets":[0,1])"), 1,
                      "a whole number");
  ExpectHeaderRefused(tensor(R"("dtype":"U8","shape":[01],"data_offsets":[0,1])"), 1,
                      "leading zeros");
  ExpectHeaderRefused(tensor(R"("dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1])"),
                      1, "below 2^64");
  ExpectHeaderRefused(
      tensor(R"("dtype":"F64","shape":[1152921504606846976,16],"data_offsets":[0,0])"), 0,
      "overflows");
  ExpectHeaderRefused(tensor(R"("dtype":"U8","shape":[1],"data_offsets":[1,0])"), 1,
                      "expected begin and end");
  ExpectHeaderRefused(tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,2])"), 1,
                      "expected begin and end");
  ExpectHeaderRefused(tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0])"), 1,
                      "expected begin and end");
  ExpectHeaderRefused(tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,1,2])"), 1,
                      "more than two");
  std::string dims = "1";
  for (int i = 0; i < 40; ++i) dims += ",1";
  ExpectHeaderRefused(tensor(R"("dtype":"U8","shape":[)" + dims + R"(],"data_offsets":[0,1])"), 1,
                      "at most 32");
}

TEST(SafetensorsHeaderTest, TensorsMustTileTheData) {
  const auto two = [](const std::string& a, const std::string& b) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + a +
           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}";
  };
  EXPECT_TRUE(Read(File(two("[4,8]", "[0,4]"), 8)).ok());
  ExpectHeaderRefused(two("[0,4]", "[3,7]"), 7, "overlaps");
  ExpectHeaderRefused(two("[0,4]", "[0,4]"), 4, "overlaps");
  ExpectHeaderRefused(two("[0,4]", "[5,9]"), 9, "hole");
  ExpectHeaderRefused(two("[1,5]", "[5,9]"), 9, "hole");
  ExpectHeaderRefused(two("[0,4]", "[4,8]"), 9, "1 bytes behind the last");
}

TEST(SafetensorsHeaderTest, DeepNestingIsRefusedNotFollowed) {
  const auto index = ParseSafetensorsIndex(std::string(100'000, '[').insert(0, "{\"metadata\":"));
  ExpectRefused(index.status(), absl::StatusCode::kInvalidArgument, {"nesting"});
}

TEST(SafetensorsIndexTest, NamesFilesOfItsOwnFolderOnly) {
  const auto index = ParseSafetensorsIndex(
      R"({"metadata":{"total_size":12,"x":[1.5e-3,null,true]},"weight_map":{"w":"a.safetensors"}})");
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->at("w"), "a.safetensors");
  for (const std::string path :
       {"../a", "/etc/passwd", "b/a", "", ".", "..", "a/../../b", "a\\u0000b"}) {
    ExpectRefused(ParseSafetensorsIndex(R"({"weight_map":{"w":")" + path + R"("}})").status(),
                  absl::StatusCode::kInvalidArgument, {"expected a name in the same folder"});
  }
  ExpectRefused(ParseSafetensorsIndex("{}").status(), absl::StatusCode::kInvalidArgument,
                {"no weight_map"});
}

}  // namespace
}  // namespace espalier::formats
