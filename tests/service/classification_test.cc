#include "service/classification.h"

#include <cmath>
#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace espalier::service {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> Elements(const Classes& classes) {
  std::vector<std::string> elements;
  for (size_t at = 0; at < classes.bytes.size();) {
    uint32_t length;
    std::memcpy(&length, classes.bytes.data() + at, sizeof(length));
    elements.push_back(classes.bytes.substr(at + sizeof(length), length));
    at += sizeof(length) + length;
  }
  return elements;
}

template <typename T>
Classes Best(DType dtype, const Shape& shape, bool batches, const std::vector<T>& values, int64_t k,
             const std::vector<std::string>& labels = {}) {
  auto best = BestClasses(dtype, shape, batches, reinterpret_cast<const std::byte*>(values.data()),
                          k, labels);
  EXPECT_TRUE(best.ok()) << best.status();
  return *std::move(best);
}

TEST(ClassificationTest, TheBestOfEveryItemComeFirstWithTheirLabels) {
  const Classes best = Best<float>(DType::kFloat32, {2, 4}, true,
                                   {0.5f, -1, 15.349566f, 3, 9, 8, 7, 1e9f}, 2, {"a", "b", "MUG"});
  EXPECT_THAT(best.shape, ElementsAre(2, 2));
  EXPECT_THAT(Elements(best),
              ElementsAre("15.349566:2:MUG", "3.000000:3", "1000000000.000000:3", "9.000000:0:a"));
}

TEST(ClassificationTest, AModelThatDoesNotBatchHasOneListOfClasses) {
  const Classes best = Best<float>(DType::kFloat32, {2, 2}, false, {1, 2, 4, 3}, 3);
  EXPECT_THAT(best.shape, ElementsAre(3));
  EXPECT_THAT(Elements(best), ElementsAre("4.000000:2", "3.000000:3", "2.000000:1"));
}

TEST(ClassificationTest, WithFewerClassesThanAskedForThereAreAllOfThem) {
  const Classes best = Best<float>(DType::kFloat32, {1, 2}, true, {1, 2}, INT64_MAX);
  EXPECT_THAT(best.shape, ElementsAre(1, 2));
  EXPECT_THAT(Elements(best), ElementsAre("2.000000:1", "1.000000:0"));
}

TEST(ClassificationTest, EqualValuesAreInOrderAndNanIsLast) {
  const Classes best =
      Best<float>(DType::kFloat32, {1, 6}, true, {NAN, 1, -INFINITY, 1, NAN, INFINITY}, 6);
  const auto elements = Elements(best);
  EXPECT_THAT(elements, ElementsAre("inf:5", "1.000000:1", "1.000000:3", "-inf:2",
                                    ::testing::EndsWith("nan:0"), ::testing::EndsWith("nan:4")));
}

TEST(ClassificationTest, EveryTypeOfNumberIsOrderedAndWrittenAsItself) {
  const auto one = [](DType dtype, auto values) {
    return Elements(Best(dtype, {static_cast<int64_t>(values.size())}, false, values, 1)).front();
  };
  EXPECT_EQ(one(DType::kUint8, std::vector<uint8_t>{1, 200}), "200:1");
  EXPECT_EQ(one(DType::kUint16, std::vector<uint16_t>{60000, 2}), "60000:0");
  EXPECT_EQ(one(DType::kUint32, std::vector<uint32_t>{4'000'000'000, 2}), "4000000000:0");
  EXPECT_EQ(one(DType::kUint64, std::vector<uint64_t>{1, ~0ull}), "18446744073709551615:1");
  EXPECT_EQ(one(DType::kInt8, std::vector<int8_t>{-1, -2}), "-1:0");
  EXPECT_EQ(one(DType::kInt16, std::vector<int16_t>{-300, 300}), "300:1");
  EXPECT_EQ(one(DType::kInt32, std::vector<int32_t>{INT32_MIN, -5}), "-5:1");
  EXPECT_EQ(one(DType::kInt64, std::vector<int64_t>{INT64_MIN, INT64_MAX}),
            "9223372036854775807:1");
  EXPECT_EQ(one(DType::kFloat64, std::vector<double>{0.1, 0.2}), "0.200000:1");
  // 1.5, −2, the smallest subnormal and infinity as halves; 1.5 and −2 as bfloat16.
  EXPECT_EQ(one(DType::kFloat16, std::vector<uint16_t>{0x3e00, 0xc000, 0x0001}), "1.500000:0");
  EXPECT_EQ(one(DType::kFloat16, std::vector<uint16_t>{0xc000, 0x0001}), "0.000000:1");
  EXPECT_EQ(one(DType::kFloat16, std::vector<uint16_t>{0x3e00, 0x7c00}), "inf:1");
  EXPECT_EQ(one(DType::kBFloat16, std::vector<uint16_t>{0xc000, 0x3fc0}), "1.500000:1");
}

TEST(ClassificationTest, BoolHasNoOrder) {
  const std::byte data[2] = {};
  const auto best = BestClasses(DType::kBool, {2}, false, data, 1, {});
  EXPECT_EQ(best.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(best.status().message()), ::testing::HasSubstr("BOOL"));
}

}  // namespace
}  // namespace espalier::service
