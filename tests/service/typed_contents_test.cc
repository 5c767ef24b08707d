#include "service/typed_contents.h"

#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/inference/grpc_service.pb.h"

namespace espalier::service {
namespace {

using ::testing::HasSubstr;

// `bytes` must live as long as the result.
DecodedInput Input(const std::string& datatype, const std::string& bytes) {
  DecodedInput input{.name = "x", .datatype = datatype, .shape = {3}, .has_contents = true};
  for (size_t i = 0; i < bytes.size(); ++i)
    input.contents.push_back({reinterpret_cast<const std::byte*>(&bytes[i]), 1});
  return input;
}

template <typename T>
std::string Raw(std::initializer_list<T> values) {
  return std::string(reinterpret_cast<const char*>(values.begin()), values.size() * sizeof(T));
}

void ExpectElements(const std::string& datatype, const inference::InferTensorContents& contents,
                    const std::string& raw) {
  const std::string bytes = contents.SerializeAsString();
  auto elements = RawElements(Input(datatype, bytes), 3);
  ASSERT_TRUE(elements.ok()) << datatype << ": " << elements.status();
  EXPECT_EQ(*elements, raw) << datatype;
}

TEST(TypedContentsTest, EveryDatatypeTravelsInItsField) {
  inference::InferTensorContents bools, ints, longs, uints, ulongs, floats, doubles, strings;
  for (bool v : {true, false, true}) bools.add_bool_contents(v);
  for (int v : {-1, 2, 3}) ints.add_int_contents(v);
  for (int64_t v : {INT64_MIN, int64_t{2}, INT64_MAX}) longs.add_int64_contents(v);
  for (uint32_t v : {1u, 2u, 255u}) uints.add_uint_contents(v);
  for (uint64_t v : {uint64_t{1}, uint64_t{2}, UINT64_MAX}) ulongs.add_uint64_contents(v);
  for (float v : {1.5f, -0.0f, 3e38f}) floats.add_fp32_contents(v);
  for (double v : {1.5, -2.0, 1e300}) doubles.add_fp64_contents(v);
  for (const char* v : {"a", "", "xyz"}) strings.add_bytes_contents(v);
  ExpectElements("BOOL", bools, Raw<uint8_t>({1, 0, 1}));
  ExpectElements("INT8", ints, Raw<int8_t>({-1, 2, 3}));
  ExpectElements("INT16", ints, Raw<int16_t>({-1, 2, 3}));
  ExpectElements("INT32", ints, Raw<int32_t>({-1, 2, 3}));
  ExpectElements("INT64", longs, Raw<int64_t>({INT64_MIN, 2, INT64_MAX}));
  ExpectElements("UINT8", uints, Raw<uint8_t>({1, 2, 255}));
  ExpectElements("UINT16", uints, Raw<uint16_t>({1, 2, 255}));
  ExpectElements("UINT32", uints, Raw<uint32_t>({1, 2, 255}));
  ExpectElements("UINT64", ulongs, Raw<uint64_t>({1, 2, UINT64_MAX}));
  ExpectElements("FP32", floats, Raw<float>({1.5f, -0.0f, 3e38f}));
  ExpectElements("FP64", doubles, Raw<double>({1.5, -2.0, 1e300}));
  ExpectElements("BYTES", strings, std::string("\1\0\0\0a\0\0\0\0\3\0\0\0xyz", 16));
}

TEST(TypedContentsTest, ElementsMayComeOneByOne) {
  EXPECT_EQ(*RawElements(Input("INT32", "\x10\x01\x10\x02\x12\x01\x03"), 3),
            Raw<int32_t>({1, 2, 3}));
}

void ExpectRefused(const std::string& datatype, const inference::InferTensorContents& contents,
                   int64_t elements, const std::string& text) {
  const std::string bytes = contents.SerializeAsString();
  auto result = RawElements(Input(datatype, bytes), elements);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr(text));
}

TEST(TypedContentsTest, TheWrongFieldCountOrDatatypeIsRefused) {
  inference::InferTensorContents floats, both;
  for (int i = 0; i < 3; ++i) floats.add_fp32_contents(1);
  both = floats;
  both.add_int_contents(1);
  ExpectRefused("INT32", floats, 3, "data-type 'INT32' travels in int_contents, got fp32_contents");
  ExpectRefused("FP32", both, 3, "data-type 'FP32' travels in fp32_contents, got int_contents");
  ExpectRefused("FP32", floats, 2, "more elements than its shape has");
  ExpectRefused("FP32", floats, 4, "expected 4 elements for shape [3], got 3");
  ExpectRefused("FP16", floats, 3, "'FP16' has no typed form; send it in raw_input_contents");
  ExpectRefused("BF16", floats, 3, "no typed form");
  ExpectRefused("COMPLEX", floats, 3, "'COMPLEX' has no typed form");
}

TEST(TypedContentsTest, MalformedContentsAreRefused) {
  for (const char* bytes : {"\x32\x03\x01\x02\x03", "\x35\x01\x02", "\x32\xff\xff\xff\xff\x0f"}) {
    EXPECT_EQ(RawElements(Input("FP32", bytes), 3).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST(TypedContentsTest, AHugeElementCountReservesNoMemory) {
  EXPECT_FALSE(RawElements(Input("FP64", "\x3a\x00"), int64_t{1} << 60).ok());
}

}  // namespace
}  // namespace espalier::service
