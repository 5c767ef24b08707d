#include "engine/formats/onnx_wire.h"

#include <onnx/onnx_pb.h>

#include <limits>

#include "engine/formats/onnx_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/formats/onnx_builder.h"

namespace espalier::formats {
namespace {

using absl::StatusCode;
using espalier::testing::AddAttribute;
using espalier::testing::ExpectRefused;
using espalier::testing::SmallModel;

absl::StatusOr<int64_t> Priced(absl::string_view wire,
                               int64_t limit = std::numeric_limits<int64_t>::max()) {
  return ParsedBytes(wire, *onnx::ModelProto::descriptor(), limit);
}

absl::Status ReadBytes(const std::string& bytes) {
  return ReadOnnxBytes(bytes, "m.onnx", "", {}).status();
}

TEST(OnnxWireTest, ThePriceIsWithinAFactorOfTwoOfWhatProtobufTakes) {
  onnx::ModelProto model = SmallModel();
  for (int i = 0; i < 100; ++i) {
    *model.mutable_graph()->add_node() = model.graph().node(0);
    model.mutable_graph()->mutable_initializer(0)->add_int64_data(i);
    model.mutable_graph()->mutable_initializer(0)->add_float_data(1);
  }
  model.mutable_graph()->mutable_initializer(0)->set_raw_data(std::string(100000, 'x'));
  onnx::ModelProto parsed;
  ASSERT_TRUE(parsed.ParseFromString(model.SerializeAsString()));
  const auto priced = Priced(model.SerializeAsString());
  ASSERT_TRUE(priced.ok()) << priced.status();
  EXPECT_GT(static_cast<double>(*priced), 0.5 * static_cast<double>(parsed.SpaceUsedLong()));
  EXPECT_LT(static_cast<double>(*priced), 2.0 * static_cast<double>(parsed.SpaceUsedLong()));
}

TEST(OnnxWireTest, AFileOfEmptyNodesIsRefusedBeforeItIsParsed) {
  // graph (field 7) with ten million times "node (field 1), empty": 20 MB that would take 2 GB.
  std::string nodes;
  for (int i = 0; i < 10000000; ++i) nodes += "\x0a\x00"[0], nodes += '\0';
  onnx::ModelProto model = SmallModel();
  std::string wire = model.SerializeAsString();
  wire += '\x3a';
  for (size_t size = nodes.size(); size > 0; size >>= 7) {
    wire += static_cast<char>((size & 0x7f) | (size > 0x7f ? 0x80 : 0));
  }
  wire += nodes;
  ExpectRefused(ReadBytes(wire), StatusCode::kResourceExhausted,
                {"m.onnx: graph: node: parsing the file takes more than"});
  ExpectRefused(Priced(SmallModel().SerializeAsString(), 1000).status(),
                StatusCode::kResourceExhausted, {"takes more than 1000 bytes"});
}

TEST(OnnxWireTest, ALengthThatLiesIsRefusedWithItsPlace) {
  const std::string half_gib_tag =
      "\x3a\xff\xff\xff\xff\x01";  // graph of 512 MiB, of which nothing follows
  ExpectRefused(ReadBytes(half_gib_tag), StatusCode::kInvalidArgument,
                {"m.onnx: graph: malformed at byte 1: expected 536870911 more bytes, got 0"});
}

TEST(OnnxWireTest, EveryTruncationOfAModelIsRefused) {
  const std::string whole = SmallModel().SerializeAsString();
  ASSERT_TRUE(ReadBytes(whole).ok());
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(ReadBytes(whole.substr(0, size)).ok())
        << size << " of " << whole.size() << " bytes";
  }
}

TEST(OnnxWireTest, MalformedFieldsAreRefused) {
  for (const char* wire : {"\x08", "\x08\x80", "\x09\x01", "\x0d\x01\x02", "\x3b\x3c", "\x07"}) {
    ExpectRefused(Priced(wire).status(), StatusCode::kInvalidArgument, {"malformed at byte"});
  }
  ExpectRefused(Priced(absl::string_view("\x00\x00", 2)).status(), StatusCode::kInvalidArgument,
                {"bad field tag"});
  ExpectRefused(Priced("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff").status(),
                StatusCode::kInvalidArgument, {"bad field tag"});
}

TEST(OnnxWireTest, UnknownFieldsOfLaterVersionsAreSkipped) {
  std::string wire = SmallModel().SerializeAsString();
  wire +=
      "\xda\x06\x03"
      "abc";               // field 107, three bytes
  wire += "\xd8\x06\x2a";  // field 107, a number
  EXPECT_TRUE(ReadBytes(wire).ok()) << ReadBytes(wire);
}

TEST(OnnxWireTest, NestingIsBounded) {
  onnx::GraphProto graph;
  for (int i = 0; i < 40; ++i) {
    onnx::GraphProto outer;
    auto* node = outer.add_node();
    node->set_op_type("If");
    auto* attribute = AddAttribute(*node, "then_branch", onnx::AttributeProto::GRAPH);
    attribute->mutable_g()->Swap(&graph);
    graph.Swap(&outer);
  }
  onnx::ModelProto model = SmallModel();
  *model.mutable_graph()->add_node() = graph.node(0);
  ExpectRefused(ReadBytes(model.SerializeAsString()), StatusCode::kInvalidArgument,
                {"nested more than 64 deep"});
}

}  // namespace
}  // namespace espalier::formats
