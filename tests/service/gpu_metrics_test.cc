#include "service/gpu_metrics.h"

#include <map>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "prometheus/metric_family.h"
#include "tests/testing/fake_cuda.h"

namespace espalier::service {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

class FakeReader final : public GpuUsageReader {
 public:
  bool Read(const CudaDevice& gpu, GpuUsage* usage) const override {
    *usage = {0.25, 100, 200, 300.5};
    return gpu.index() == 0;  // the driver does not answer for the other one
  }
};

// "name gpu" -> value.
std::map<std::string, double> Collect(const prometheus::Collectable& collector) {
  std::map<std::string, double> values;
  for (const auto& family : collector.Collect()) {
    for (const auto& metric : family.metric)
      values[family.name + " " + metric.label[0].value] = metric.gauge.value;
  }
  return values;
}

TEST(GpuMetricsTest, EveryGpuIsToldAndOneThatDoesNotAnswerIsLeftOut) {
  auto& fake = espalier::testing::FakeCuda::Reset();
  fake.devices = 2;
  const auto devices = OpenDevices({.threads = 1}, espalier::testing::FakeCuda::Module());
  ASSERT_TRUE(devices.ok());
  const auto collector = MakeGpuMetricsCollector(*devices, std::make_unique<FakeReader>());
  EXPECT_THAT(Collect(*collector),
              ElementsAre(Pair("espalier_gpu_lost 0", 0), Pair("espalier_gpu_lost 1", 0),
                          Pair("espalier_gpu_memory_total_bytes 0", 200),
                          Pair("espalier_gpu_memory_used_bytes 0", 100),
                          Pair("espalier_gpu_power_watts 0", 300.5),
                          Pair("espalier_gpu_utilization_ratio 0", 0.25)));
  fake.broken = "an illegal memory access was encountered";
  EXPECT_FALSE(devices->gpus[1]->Allocate(1).ok());
  const auto without_nvml = MakeGpuMetricsCollector(*devices, nullptr);
  EXPECT_THAT(Collect(*without_nvml),
              ElementsAre(Pair("espalier_gpu_lost 0", 0), Pair("espalier_gpu_lost 1", 1)));
}

}  // namespace
}  // namespace espalier::service
