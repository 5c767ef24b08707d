#include "engine/tensor/gpu_usage.h"

#include "gtest/gtest.h"
#include "tests/testing/fake_cuda.h"

namespace espalier {
namespace {

TEST(GpuUsageTest, ReadsWhatTheDriverSaysInBaseUnits) {
  testing::FakeCuda::Reset();
  const auto gpu = CudaDevice::Open(testing::FakeCuda::Module(), {});
  ASSERT_TRUE(gpu.ok());
  const auto reader = OpenGpuUsageReader(FAKE_NVML);
  ASSERT_NE(reader, nullptr);
  GpuUsage usage;
  ASSERT_TRUE(reader->Read(**gpu, &usage));
  EXPECT_DOUBLE_EQ(usage.utilization, 0.37);
  EXPECT_EQ(usage.memory_used_bytes, uint64_t{3} << 30);
  EXPECT_EQ(usage.memory_total_bytes, uint64_t{8} << 30);
  EXPECT_DOUBLE_EQ(usage.power_watts, 250.5);
}

TEST(GpuUsageTest, WithoutNvmlOrWithAnotherLibraryThereIsNoReader) {
  EXPECT_EQ(OpenGpuUsageReader("/nowhere/libnvidia-ml.so.1"), nullptr);
  EXPECT_EQ(OpenGpuUsageReader("libz.so.1"), nullptr);
}

}  // namespace
}  // namespace espalier
