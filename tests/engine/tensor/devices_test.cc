#include "engine/tensor/devices.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/fake_cuda.h"

namespace espalier {
namespace {

using ::testing::AllOf;
using testing::FakeCuda;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(DevicesTest, EveryUsableGpuIsOpened) {
  FakeCuda::Reset().devices = 2;
  const auto devices = OpenDevices({}, FakeCuda::Module());
  ASSERT_TRUE(devices.ok()) << devices.status();
  ASSERT_EQ(devices->gpus.size(), 2u);
  EXPECT_EQ(devices->gpus[1]->index(), 1);
  EXPECT_THAT(devices->Description(), StartsWith("2 x cuda Fake GPU"));
}

TEST(DevicesTest, AutoFallsBackToTheCpuWithAReasonAndCudaDoesNot) {
  FakeCuda& fake = FakeCuda::Reset();
  fake.devices = 0;
  const auto without = OpenDevices({.mode = DeviceMode::kAuto}, FakeCuda::Module());
  ASSERT_TRUE(without.ok());
  EXPECT_TRUE(without->gpus.empty());
  EXPECT_THAT(without->why_no_gpu, HasSubstr("the driver lists none"));
  EXPECT_THAT(without->Description(), StartsWith("cpu"));
  fake.devices = 1;
  fake.compute_major = 6;
  const auto old = OpenDevices({.mode = DeviceMode::kCuda}, FakeCuda::Module());
  EXPECT_TRUE(absl::IsFailedPrecondition(old.status()));
  EXPECT_THAT(std::string(old.status().message()), HasSubstr("compute capability 6.0"));
}

TEST(DevicesTest, AModuleThatIsNotThereIsNamed) {
  const auto devices = OpenDevices({.cuda_module = "/nowhere/libespalier_cuda.so"});
  ASSERT_TRUE(devices.ok());
  EXPECT_THAT(devices->why_no_gpu,
              AllOf(HasSubstr("no CUDA module"), HasSubstr("/nowhere/libespalier_cuda.so")));
  EXPECT_FALSE(
      OpenDevices({.mode = DeviceMode::kCuda, .cuda_module = "/nowhere/libespalier_cuda.so"}).ok());
  const auto cpu = OpenDevices({.mode = DeviceMode::kCpu, .threads = 1});
  ASSERT_TRUE(cpu.ok());
  EXPECT_EQ(cpu->cpu->threads(), 1);
}

}  // namespace
}  // namespace espalier
