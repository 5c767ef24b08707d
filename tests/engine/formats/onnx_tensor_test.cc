#include "engine/formats/onnx_tensor.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/formats/onnx_builder.h"

namespace espalier::formats {
namespace {

using absl::StatusCode;
using espalier::testing::Elements;
using espalier::testing::ExpectRefused;
using espalier::testing::MakeRaw;
using espalier::testing::MakeSparse;
using espalier::testing::MakeTensor;
using onnx::TensorProto;
using ::testing::ElementsAre;

absl::StatusOr<Tensor> Dense(const TensorProto& proto, const ReadLimits& limits = {}) {
  return OnnxConstants("", limits).Dense(proto);
}

absl::StatusOr<Tensor> Sparse(const onnx::SparseTensorProto& proto, const ReadLimits& limits = {}) {
  return OnnxConstants("", limits).Sparse(proto);
}

void ExpectInvalid(const absl::Status& status, const std::vector<std::string>& parts) {
  ExpectRefused(status, StatusCode::kInvalidArgument, parts);
}

TEST(OnnxTensorTest, RawDataIsCopiedForEveryElementType) {
  struct Case {
    int type;
    DType dtype;
  };
  for (const Case& c : std::vector<Case>{{TensorProto::FLOAT, DType::kFloat32},
                                         {TensorProto::UINT8, DType::kUint8},
                                         {TensorProto::INT8, DType::kInt8},
                                         {TensorProto::UINT16, DType::kUint16},
                                         {TensorProto::INT16, DType::kInt16},
                                         {TensorProto::INT32, DType::kInt32},
                                         {TensorProto::INT64, DType::kInt64},
                                         {TensorProto::BOOL, DType::kBool},
                                         {TensorProto::FLOAT16, DType::kFloat16},
                                         {TensorProto::DOUBLE, DType::kFloat64},
                                         {TensorProto::UINT32, DType::kUint32},
                                         {TensorProto::UINT64, DType::kUint64},
                                         {TensorProto::BFLOAT16, DType::kBFloat16}}) {
    std::vector<uint8_t> bytes(SizeOf(c.dtype) * 6);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i % 2);
    const auto tensor = Dense(MakeRaw("t", c.type, {2, 3}, bytes));
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_EQ(tensor->dtype(), c.dtype);
    EXPECT_THAT(tensor->shape(), ElementsAre(2, 3));
    EXPECT_EQ(std::memcmp(tensor->data(), bytes.data(), bytes.size()), 0) << NameOf(c.dtype);
  }
}

TEST(OnnxTensorTest, TypedFieldsOfTheirOwnTypeAreCopied) {
  auto floats = MakeTensor("t", TensorProto::FLOAT, {2});
  floats.add_float_data(-0.0f);
  floats.add_float_data(std::numeric_limits<float>::infinity());
  const auto read_floats = Dense(floats);
  ASSERT_TRUE(read_floats.ok());
  EXPECT_TRUE(std::signbit(read_floats->As<float>()[0]));
  EXPECT_TRUE(std::isinf(read_floats->As<float>()[1]));

  auto doubles = MakeTensor("t", TensorProto::DOUBLE, {1});
  doubles.add_double_data(1e300);
  EXPECT_THAT(Elements<double>(*Dense(doubles)), ElementsAre(1e300));

  auto longs = MakeTensor("t", TensorProto::INT64, {1});
  longs.add_int64_data(INT64_MIN);
  EXPECT_THAT(Elements<int64_t>(*Dense(longs)), ElementsAre(INT64_MIN));

  auto unsigned_longs = MakeTensor("t", TensorProto::UINT64, {1});
  unsigned_longs.add_uint64_data(UINT64_MAX);
  EXPECT_THAT(Elements<uint64_t>(*Dense(unsigned_longs)), ElementsAre(UINT64_MAX));

  auto ints = MakeTensor("t", TensorProto::INT32, {2});
  ints.add_int32_data(INT32_MIN);
  ints.add_int32_data(INT32_MAX);
  EXPECT_THAT(Elements<int32_t>(*Dense(ints)), ElementsAre(INT32_MIN, INT32_MAX));
}

// Types that share a wider field, with the smallest and largest value that fits and one that does not.
template <typename T>
void ExpectNarrowed(int type, int64_t low, int64_t high) {
  const bool in_uint64 = type == TensorProto::UINT32;
  const auto tensor = [&](int64_t first, int64_t second) {
    auto proto = MakeTensor("t", type, {2});
    for (int64_t value : {first, second}) {
      if (in_uint64) {
        proto.add_uint64_data(static_cast<uint64_t>(value));
      } else {
        proto.add_int32_data(static_cast<int32_t>(value));
      }
    }
    return Dense(proto);
  };
  const auto good = tensor(low, high);
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_THAT(Elements<T>(*good), ElementsAre(static_cast<T>(low), static_cast<T>(high)));
  ExpectInvalid(tensor(low, high + 1).status(),
                {absl::StrCat("element 1 is ", high + 1), absl::StrCat("to ", high)});
  if (!in_uint64)
    ExpectInvalid(tensor(low - 1, high).status(), {absl::StrCat("element 0 is ", low - 1)});
}

TEST(OnnxTensorTest, NarrowTypesAreReadFromWideFieldsAndNeverTruncated) {
  ExpectNarrowed<uint8_t>(TensorProto::BOOL, 0, 1);
  ExpectNarrowed<uint8_t>(TensorProto::UINT8, 0, 255);
  ExpectNarrowed<int8_t>(TensorProto::INT8, -128, 127);
  ExpectNarrowed<uint16_t>(TensorProto::UINT16, 0, 65535);
  ExpectNarrowed<int16_t>(TensorProto::INT16, -32768, 32767);
  ExpectNarrowed<uint16_t>(TensorProto::FLOAT16, 0, 65535);
  ExpectNarrowed<uint16_t>(TensorProto::BFLOAT16, 0, 65535);
  ExpectNarrowed<uint32_t>(TensorProto::UINT32, 0, int64_t{UINT32_MAX});
}

TEST(OnnxTensorTest, ScalarsAndEmptyTensorsAreRead) {
  const auto scalar = Dense(MakeRaw<float>("t", TensorProto::FLOAT, {}, {7}));
  ASSERT_TRUE(scalar.ok());
  EXPECT_TRUE(scalar->shape().empty());
  EXPECT_THAT(Elements<float>(*scalar), ElementsAre(7));
  const auto empty = Dense(MakeTensor("t", TensorProto::FLOAT, {0, 5}));
  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_EQ(empty->elements(), 0);
}

TEST(OnnxTensorTest, AnotherSizeThanTheShapeIsRefusedWithBoth) {
  ExpectInvalid(Dense(MakeRaw<float>("t", TensorProto::FLOAT, {2, 3}, {1, 2, 3, 4, 5})).status(),
                {"raw_data of FLOAT [2, 3] has 20 bytes, expected 24"});
  ExpectInvalid(Dense(MakeTensor("t", TensorProto::FLOAT, {1})).status(),
                {"has 0 bytes, expected 4"});
  ExpectInvalid(Dense(MakeRaw<float>("t", TensorProto::FLOAT, {0}, {1})).status(),
                {"has 4 bytes, expected 0"});
  auto typed = MakeTensor("t", TensorProto::INT64, {2});
  typed.add_int64_data(1);
  ExpectInvalid(Dense(typed).status(), {"int64_data of INT64 [2] has 1 elements, expected 2"});
}

TEST(OnnxTensorTest, HugeShapesAreRefusedBeforeMemoryIsReserved) {
  // The sizes contradict the shape, which is found out first; none of these could be allocated.
  ExpectInvalid(
      Dense(MakeRaw<float>("t", TensorProto::FLOAT, {int64_t{1} << 40, 1 << 10}, {1})).status(),
      {"has 4 bytes, expected 4503599627370496"});
  ExpectInvalid(
      Dense(MakeTensor("t", TensorProto::FLOAT, {int64_t{1} << 40, int64_t{1} << 40})).status(),
      {"2^62"});
  ExpectRefused(Dense(MakeTensor("t", TensorProto::DOUBLE, {int64_t{1} << 61})).status(),
                StatusCode::kResourceExhausted, {"2305843009213693952 elements"});
  ExpectInvalid(Dense(MakeTensor("t", TensorProto::FLOAT, {2, -3})).status(),
                {"[2, -3]", "negative"});
  ExpectInvalid(Dense(MakeTensor("t", TensorProto::FLOAT, std::vector<int64_t>(33, 1))).status(),
                {"has 33 dimensions, expected at most 32"});
}

TEST(OnnxTensorTest, LimitsHoldForOneConstantAndForAllTogether) {
  ReadLimits limits;
  limits.max_tensor_bytes = 8;
  const auto pair = MakeRaw<float>("t", TensorProto::FLOAT, {2}, {1, 2});
  EXPECT_TRUE(Dense(pair, limits).ok());
  ExpectRefused(Dense(MakeRaw<float>("t", TensorProto::FLOAT, {3}, {1, 2, 3}), limits).status(),
                StatusCode::kResourceExhausted,
                {"takes 12 bytes, the limit for one constant is 8"});
  limits.max_total_bytes = 15;
  OnnxConstants constants("", limits);
  EXPECT_TRUE(constants.Dense(pair).ok());
  ExpectRefused(constants.Dense(pair).status(), StatusCode::kResourceExhausted,
                {"takes 8 bytes after 8, the limit for all constants is 15"});
}

TEST(OnnxTensorTest, TwoSourcesOfElementsOrTheWrongOneAreRefused) {
  auto both = MakeRaw<float>("t", TensorProto::FLOAT, {1}, {1});
  both.add_float_data(1);
  ExpectInvalid(Dense(both).status(), {"both raw_data and float_data"});

  auto wrong = MakeTensor("t", TensorProto::INT64, {1});
  wrong.add_float_data(1);
  ExpectInvalid(Dense(wrong).status(),
                {"stores float_data, expected int64_data or raw_data for INT64"});

  auto text = MakeRaw<float>("t", TensorProto::FLOAT, {1}, {1});
  text.add_string_data("1");
  ExpectInvalid(Dense(text).status(), {"stores string_data, expected float_data"});

  auto leftover = MakeRaw<float>("t", TensorProto::FLOAT, {1}, {1});
  leftover.add_external_data()->set_key("location");
  ExpectInvalid(Dense(leftover).status(),
                {"gives external data, but its data_location is not EXTERNAL"});
}

TEST(OnnxTensorTest, ElementTypesWithoutElementsOfOursAreNamed) {
  ExpectInvalid(Dense(MakeTensor("t", 0, {1})).status(), {"no element type"});
  const auto unsupported = [](int type, const char* name) {
    ExpectRefused(Dense(MakeTensor("t", type, {1})).status(), StatusCode::kUnimplemented, {name});
  };
  unsupported(TensorProto::STRING, "STRING");
  unsupported(TensorProto::COMPLEX64, "COMPLEX64");
  unsupported(17, "FLOAT8E4M3FN");
  unsupported(22, "INT4");
  unsupported(99, "99 is not known");
  unsupported(-1, "-1 is not known");
  auto segment = MakeRaw<float>("t", TensorProto::FLOAT, {1}, {1});
  segment.mutable_segment()->set_end(1);
  ExpectRefused(Dense(segment).status(), StatusCode::kUnimplemented, {"segments"});
}

TEST(OnnxTensorTest, BytesThatAreNoBoolAreRefused) {
  EXPECT_TRUE(Dense(MakeRaw<uint8_t>("t", TensorProto::BOOL, {2}, {0, 1})).ok());
  ExpectInvalid(Dense(MakeRaw<uint8_t>("t", TensorProto::BOOL, {2}, {0, 2})).status(),
                {"element 1 of BOOL is 2, expected 0 or 1"});
}

TEST(OnnxSparseTensorTest, BothIndexFormsGiveTheSameTensor) {
  const auto linear = Sparse(MakeSparse("w", {2, 3}, {1, 2, 3}, {3}, {0, 2, 4}));
  const auto tuples = Sparse(MakeSparse("w", {2, 3}, {1, 2, 3}, {3, 2}, {0, 0, 0, 2, 1, 1}));
  ASSERT_TRUE(linear.ok()) << linear.status();
  ASSERT_TRUE(tuples.ok()) << tuples.status();
  EXPECT_THAT(Elements<float>(*linear), ElementsAre(1, 0, 2, 0, 3, 0));
  EXPECT_THAT(Elements<float>(*tuples), ElementsAre(1, 0, 2, 0, 3, 0));
  EXPECT_THAT(tuples->shape(), ElementsAre(2, 3));
}

TEST(OnnxSparseTensorTest, ElementsOfEverySizeAreScattered) {
  const auto read = [](int type, const auto& values) {
    onnx::SparseTensorProto sparse = MakeSparse("w", {5}, {}, {2}, {1, 3});
    *sparse.mutable_values() = MakeRaw("w", type, {2}, values);
    return Sparse(sparse);
  };
  EXPECT_THAT(Elements<int8_t>(*read(TensorProto::INT8, std::vector<int8_t>{-1, 2})),
              ElementsAre(0, -1, 0, 2, 0));
  EXPECT_THAT(
      Elements<uint16_t>(*read(TensorProto::BFLOAT16, std::vector<uint16_t>{0x3f80, 0x8000})),
      ElementsAre(0, 0x3f80, 0, 0x8000, 0));
  EXPECT_THAT(Elements<double>(*read(TensorProto::DOUBLE, std::vector<double>{1, 2})),
              ElementsAre(0, 1, 0, 2, 0));
}

TEST(OnnxSparseTensorTest, ValuesAndIndicesMayBeTyped) {
  auto sparse = MakeSparse("w", {2, 2}, {}, {}, {});
  *sparse.mutable_values() = MakeTensor("w", TensorProto::FLOAT, {1});
  sparse.mutable_values()->add_float_data(9);
  *sparse.mutable_indices() = MakeTensor("", TensorProto::INT64, {1});
  sparse.mutable_indices()->add_int64_data(3);
  EXPECT_THAT(Elements<float>(*Sparse(sparse)), ElementsAre(0, 0, 0, 9));
}

TEST(OnnxSparseTensorTest, WithoutValuesItIsAllZeros) {
  const auto tensor = Sparse(MakeSparse("w", {2, 2}, {}, {0}, {}));
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_THAT(Elements<float>(*tensor), ElementsAre(0, 0, 0, 0));
  EXPECT_TRUE(Sparse(MakeSparse("w", {0, 2}, {}, {0, 2}, {})).ok());
}

TEST(OnnxSparseTensorTest, IndicesOutOfRangeAreRefused) {
  ExpectInvalid(Sparse(MakeSparse("w", {2, 3}, {1}, {1}, {6})).status(),
                {"index 0 is 6, expected 0 to 5"});
  ExpectInvalid(Sparse(MakeSparse("w", {2, 3}, {1}, {1}, {-1})).status(),
                {"index 0 is -1, expected 0 to 5"});
  ExpectInvalid(Sparse(MakeSparse("w", {2, 3}, {1}, {1, 2}, {1, 3})).status(),
                {"index 0 is 3 on axis 1, expected 0 to 2"});
  ExpectInvalid(Sparse(MakeSparse("w", {2, 3}, {1}, {1, 2}, {2, 0})).status(),
                {"index 0 is 2 on axis 0, expected 0 to 1"});
  ExpectInvalid(Sparse(MakeSparse("w", {0, 3}, {1}, {1}, {0})).status(), {"index 0 is 0"});
}

TEST(OnnxSparseTensorTest, IndicesMustAscendWithoutDuplicates) {
  ExpectInvalid(Sparse(MakeSparse("w", {6}, {1, 2}, {2}, {4, 2})).status(),
                {"index 1 is at position 2 after 4, expected ascending"});
  ExpectInvalid(Sparse(MakeSparse("w", {6}, {1, 2}, {2}, {4, 4})).status(),
                {"position 4 after 4", "duplicates"});
  ExpectInvalid(Sparse(MakeSparse("w", {2, 3}, {1, 2}, {2, 2}, {1, 0, 0, 2})).status(),
                {"position 2 after 3"});
}

TEST(OnnxSparseTensorTest, ShapesThatDoNotFitTogetherAreRefused) {
  ExpectInvalid(Sparse(MakeSparse("w", {2, 3}, {1, 2}, {3}, {0, 1, 2})).status(),
                {"indices have the shape [3], expected [2] or [2, 2]"});
  ExpectInvalid(Sparse(MakeSparse("w", {2, 3}, {1}, {1, 3}, {0, 1, 2})).status(),
                {"[1, 3], expected [1] or [1, 2]"});
  ExpectInvalid(Sparse(MakeSparse("w", {}, {1}, {1}, {0})).status(), {"no dimensions"});
  ExpectInvalid(Sparse(MakeSparse("w", {2, -3}, {1}, {1}, {0})).status(), {"negative"});
  auto matrix = MakeSparse("w", {2}, {}, {1}, {0});
  *matrix.mutable_values() = MakeRaw<float>("w", TensorProto::FLOAT, {1, 1}, {1});
  ExpectInvalid(Sparse(matrix).status(), {"values have 2 dimensions, expected one"});
  ExpectInvalid(Sparse(MakeSparse("w", {2}, {}, std::vector<int64_t>(5000, 0), {})).status(),
                {"indices have the shape [0, 0, 0], expected [0] or [0, 1]"});
  auto narrow = MakeSparse("w", {2}, {1}, {1}, {0});
  *narrow.mutable_indices() = MakeRaw<int32_t>("", TensorProto::INT32, {1}, {0});
  ExpectInvalid(Sparse(narrow).status(), {"indices have the element type 6, expected INT64"});
  auto cut = MakeSparse("w", {2}, {1}, {1}, {0});
  cut.mutable_indices()->set_raw_data("abc");
  ExpectInvalid(Sparse(cut).status(), {"indices: raw_data of INT64 [1] has 3 bytes, expected 8"});
}

TEST(OnnxSparseTensorTest, ExpansionIsCappedBeforeMemoryIsReserved) {
  // 100 bytes that ask for 2^50 floats, for 16 GiB, and for one byte too much of a small limit.
  ExpectRefused(Sparse(MakeSparse("w", {int64_t{1} << 25, int64_t{1} << 25}, {}, {0}, {})).status(),
                StatusCode::kResourceExhausted,
                {"expands to 1125899906842624 elements of 4 bytes"});
  ExpectRefused(Sparse(MakeSparse("w", {int64_t{1} << 32}, {}, {0}, {})).status(),
                StatusCode::kResourceExhausted, {"expand from 0 to 17179869184 bytes"});
  ReadLimits limits;
  limits.free_expanded_bytes = 64;
  limits.max_expansion = 10;
  EXPECT_TRUE(Sparse(MakeSparse("w", {16}, {}, {0}, {}), limits).ok());
  EXPECT_TRUE(Sparse(MakeSparse("w", {26}, {1}, {1}, {0}), limits).ok());  // 64 + 10 · 4 bytes
  ExpectRefused(Sparse(MakeSparse("w", {28}, {1}, {1}, {0}), limits).status(),
                StatusCode::kResourceExhausted,
                {"from 4 to 112 bytes, the limit is 64 bytes plus 10 times"});
  OnnxConstants constants("", limits);
  EXPECT_TRUE(constants.Sparse(MakeSparse("w", {16}, {}, {0}, {})).ok());
  ExpectRefused(constants.Sparse(MakeSparse("w", {16}, {}, {0}, {})).status(),
                StatusCode::kResourceExhausted, {"from 0 to 128"});
}

}  // namespace
}  // namespace espalier::formats
