#include "engine/tensor/tensor.h"

#include <sys/mman.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <limits>

#include "engine/tensor/device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace espalier {
namespace {

TEST(ShapeTest, ElementCountRefusesOverflowEvenBesideAZeroDimension) {
  EXPECT_EQ(*ElementCount({2, 3, 4}), 24);
  EXPECT_EQ(*ElementCount({}), 1);
  EXPECT_EQ(*ElementCount({0, 5}), 0);
  EXPECT_FALSE(ElementCount({-1, 5}).ok());
  EXPECT_FALSE(ElementCount({int64_t{1} << 40, int64_t{1} << 40}).ok());
  EXPECT_FALSE(ElementCount({0, int64_t{1} << 40, int64_t{1} << 40}).ok());
}

TEST(TensorTest, AllocationIsAlignedAndRefusesWhatCannotBe) {
  auto tensor = Tensor::Allocate(DType::kFloat32, {3, 5});
  ASSERT_TRUE(tensor.ok());
  EXPECT_EQ(tensor->bytes(), 60u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor->data()) % kAlignment, 0u);
  EXPECT_FALSE(Tensor::Allocate(DType::kBytes, {1}).ok());
  EXPECT_FALSE(Tensor::Allocate(DType::kFloat64, {int64_t{1} << 61}).ok());
}

TEST(BufferTest, ALargeBufferIsGivenBackWhole) {
  constexpr size_t kPage = 4096, kBytes = (size_t{3} << 20) + 5 * kPage + 100;
  std::byte* begin = nullptr;
  {
    Buffer buffer = *Buffer::Allocate(kBytes);
    begin = buffer.data();
  }
#if !defined(__SANITIZE_ADDRESS__)  // there it is the allocator's
  for (size_t at = 0; at < kBytes; at += kPage)
    EXPECT_EQ(msync(begin + at, kPage, MS_ASYNC), -1) << "still mapped at " << at;
#endif
}

TEST(BufferTest, AMovedFromBufferIsEmpty) {
  Buffer a = *Buffer::Allocate(100);
  Buffer b = std::move(a);
  EXPECT_EQ(b.size(), 100u);
  EXPECT_EQ(a.size(), 0u);  // NOLINT(bugprone-use-after-move): the promise under test
  EXPECT_EQ(a.data(), nullptr);
}

TEST(ConvertTest, EveryHalfSurvivesTheRoundTripThroughFloat) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float value = Float16ToFloat(static_cast<uint16_t>(bits));
    const uint16_t back = FloatToFloat16(value);
    if (std::isnan(value)) {
      EXPECT_EQ(back | 0x0200u, bits | 0x0200u);
    } else {
      ASSERT_EQ(back, bits) << value;
    }
    const float bvalue = BFloat16ToFloat(static_cast<uint16_t>(bits));
    if (!std::isnan(bvalue)) {
      ASSERT_EQ(FloatToBFloat16(bvalue), bits);
    }
  }
}

TEST(ConvertTest, HalfRoundsToNearestEven) {
  EXPECT_EQ(FloatToFloat16(1.0f + 0x1p-11f), 0x3c00);    // tie, to even
  EXPECT_EQ(FloatToFloat16(1.0f + 0x1.8p-10f), 0x3c02);  // tie, to even
  EXPECT_EQ(FloatToFloat16(65519.99f), 0x7bff);
  EXPECT_EQ(FloatToFloat16(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToFloat16(0x1p-25f), 0x0000);
  EXPECT_EQ(FloatToFloat16(0x1.8p-25f), 0x0001);
  EXPECT_EQ(FloatToFloat16(0x1.ffcp-15f), 0x0400);  // largest subnormal tie rounds into the normals
  EXPECT_EQ(FloatToBFloat16(std::bit_cast<float>(0x3f808000u)), 0x3f80);
  EXPECT_EQ(FloatToBFloat16(std::bit_cast<float>(0x3f818000u)), 0x3f82);
  EXPECT_TRUE(std::isnan(BFloat16ToFloat(FloatToBFloat16(std::bit_cast<float>(0x7f800001u)))));
}

TEST(ConvertTest, FloatToIntegerSaturates) {
  const float values[] = {1.9f, -1.9f, 1e30f, -1e30f, std::nanf("")};
  int32_t ints[5];
  ConvertElements(values, DType::kFloat32, ints, DType::kInt32, 5);
  EXPECT_THAT(ints, testing::ElementsAre(1, -1, std::numeric_limits<int32_t>::max(),
                                         std::numeric_limits<int32_t>::min(), 0));
  uint8_t bytes[5];
  ConvertElements(values, DType::kFloat32, bytes, DType::kUint8, 5);
  EXPECT_THAT(bytes, testing::ElementsAre(1, 0, 255, 0, 0));
}

TEST(CpuDeviceTest, ParallelForVisitsEveryIndexOnce) {
  auto device = MakeCpuDevice(3);
  std::atomic<int> visits[1000] = {};
  device->MakeContext().ParallelFor(1000, [&](int64_t i) { ++visits[i]; });
  for (auto& count : visits) EXPECT_EQ(count, 1);
}

TEST(CpuDeviceTest, InstancesShareThreadsUnlessEachHasItsOwn) {
  EXPECT_EQ(MakeCpuDevice(2)->ForOneInstance(), nullptr);
  auto device = MakeCpuDeviceOfInstances(2);
  const auto one = device->ForOneInstance(), other = device->ForOneInstance();
  EXPECT_EQ(one->threads(), 2);
  EXPECT_EQ(one->Description(), device->Description());
  EXPECT_EQ(one->MakeContext().threads, 2);
  EXPECT_NE(one->MakeContext().pool, other->MakeContext().pool);
  EXPECT_NE(one->MakeContext().pool, device->MakeContext().pool);
  EXPECT_EQ(one->ForOneInstance(), nullptr);
}

}  // namespace
}  // namespace espalier
