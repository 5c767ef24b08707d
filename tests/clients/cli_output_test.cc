#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "clients/cli/elements.h"
#include "clients/cli/json_writer.h"
#include "clients/cli/table.h"

namespace espalier::cli {
namespace {

using client::MakeTensor;
using client::Tensor;
using ::testing::ElementsAre;

TEST(JsonWriterTest, ObjectsAreIndentedAndArraysStayOnALine) {
  JsonWriter json;
  json.BeginObject()
      .Key("a")
      .Int(-1)
      .Key("b")
      .BeginArray()
      .Number(0.1)
      .Number(0.1f)
      .Bool(true)
      .EndArray();
  json.Key("c")
      .BeginArray()
      .BeginObject()
      .Key("d")
      .Uint(UINT64_MAX)
      .EndObject()
      .BeginObject()
      .EndObject()
      .EndArray();
  json.Key("e").BeginObject().EndObject().EndObject();
  EXPECT_EQ(json.text(),
            "{\n  \"a\": -1,\n  \"b\": [0.1, 0.1, true],\n  \"c\": [{\n    \"d\": "
            "18446744073709551615\n  }, {}],\n"
            "  \"e\": {}\n}");
}

TEST(JsonWriterTest, StringsAreEscapedAndInvalidUtf8IsReplaced) {
  JsonWriter json;
  json.String("a\"\\\n\x01µ\xFF\xC3");
  EXPECT_EQ(json.text(), "\"a\\\"\\\\\\u000a\\u0001µ\xEF\xBF\xBD\xEF\xBF\xBD\"");
  JsonWriter surrogate;
  surrogate.String("\xED\xA0\x80");  // half of a UTF-16 pair
  EXPECT_EQ(surrogate.text().find("\xED"), std::string::npos);
}

TEST(JsonWriterTest, NumbersThatJsonLacksAreStrings) {
  JsonWriter json;
  json.BeginArray()
      .Number(std::nan(""))
      .Number(-INFINITY)
      .Number(std::numeric_limits<float>::infinity())
      .EndArray();
  EXPECT_EQ(json.text(), "[\"nan\", \"-inf\", \"inf\"]");
}

TEST(TableTest, ColumnsAlignByCharactersNotBytes) {
  Table table({"NAME", ">TIME"});
  table.AddRow({"a", "87 µs"});
  table.AddRow({"longer", "1.93 ms"});
  EXPECT_EQ(table.ToString(), "NAME       TIME\na         87 µs\nlonger  1.93 ms\n");
}

TEST(TableTest, QuantitiesPickTheirUnit) {
  EXPECT_EQ(FormatMicros(87.4), "87 µs");
  EXPECT_EQ(FormatMicros(1934), "1.93 ms");
  EXPECT_EQ(FormatMicros(2.41e6), "2.41 s");
  EXPECT_EQ(FormatPercent(0.9025), "90.25 %");
}

TEST(ElementsTest, NumbersReadEveryNumericDatatype) {
  EXPECT_THAT(*Numbers(*MakeTensor<int64_t>("x", {2}, {-5, INT64_C(1) << 40})),
              ElementsAre(-5, 1099511627776.0));
  EXPECT_THAT(*Numbers(*MakeTensor<uint8_t>("x", {2}, {0, 255})), ElementsAre(0, 255));
  EXPECT_THAT(*Numbers(*MakeTensor<double>("x", {1}, {0.1})), ElementsAre(0.1));
  EXPECT_THAT(*Numbers(Tensor{"x", "FP16", {2}, std::string("\x00\x3C\x00\xC0", 4)}),
              ElementsAre(1, -2));
  EXPECT_THAT(*Numbers(Tensor{"x", "BF16", {1}, std::string("\x80\x3F", 2)}), ElementsAre(1));
  EXPECT_FALSE(Numbers(Tensor{"x", "BYTES", {0}, ""}).ok());
}

TEST(ElementsTest, TextsAreExactAndPrintable) {
  EXPECT_THAT(Texts(*MakeTensor<float>("x", {3}, {0.1f, -0.0f, 1e30f}), 1, 2),
              ElementsAre("-0", "1e+30"));
  EXPECT_THAT(Texts(*MakeTensor<uint64_t>("x", {1}, {UINT64_MAX}), 0, 1),
              ElementsAre("18446744073709551615"));
  EXPECT_THAT(Texts(*MakeTensor<int8_t>("x", {1}, {-128}), 0, 1), ElementsAre("-128"));
  EXPECT_THAT(Texts(*client::MakeBytesTensor("x", {2}, {"a\n", "b"}), 0, 2),
              ElementsAre("\"a\\n\"", "\"b\""));
}

TEST(ElementsTest, TopIndicesAreLargestFirstTiesInOrderNanLast) {
  const double values[] = {1, NAN, 3, 3, -INFINITY};
  EXPECT_THAT(TopIndices(values, 5, 3), ElementsAre(2, 3, 0));
  EXPECT_THAT(TopIndices(values, 5, 99), ElementsAre(2, 3, 0, 4, 1));
}

TEST(ElementsTest, ItemsFollowTheFirstDimension) {
  EXPECT_EQ(Items::Of(Tensor{"x", "FP32", {2, 3, 4}, ""}).item_size, 12);
  EXPECT_EQ(Items::Of(Tensor{"x", "FP32", {0, 3}, ""}).count, 0);
  EXPECT_EQ(Items::Of(Tensor{"x", "FP32", {}, ""}).item_size, 1);
}

}  // namespace
}  // namespace espalier::cli
