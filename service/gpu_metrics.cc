#include "service/gpu_metrics.h"

#include <string>
#include <utility>
#include <vector>

#include "prometheus/metric_family.h"

namespace espalier::service {
namespace {

using prometheus::MetricFamily;

class Collector final : public prometheus::Collectable {
 public:
  Collector(const Devices& devices, std::unique_ptr<GpuUsageReader> reader)
      : devices_(devices), reader_(std::move(reader)) {}

  std::vector<MetricFamily> Collect() const override {
    MetricFamily lost =
        Family("espalier_gpu_lost", "1 after an error that this process cannot recover from");
    MetricFamily utilization =
        Family("espalier_gpu_utilization_ratio", "Share of the last second in which a kernel ran");
    MetricFamily used = Family("espalier_gpu_memory_used_bytes", "Memory used by all processes");
    MetricFamily total = Family("espalier_gpu_memory_total_bytes", "Memory of the GPU");
    MetricFamily power = Family("espalier_gpu_power_watts", "Power drawn");
    for (const auto& gpu : devices_.gpus) {
      Add(lost, *gpu, gpu->lost() ? 1 : 0);
      GpuUsage usage;
      if (reader_ == nullptr || !reader_->Read(*gpu, &usage)) continue;
      Add(utilization, *gpu, usage.utilization);
      Add(used, *gpu, static_cast<double>(usage.memory_used_bytes));
      Add(total, *gpu, static_cast<double>(usage.memory_total_bytes));
      Add(power, *gpu, usage.power_watts);
    }
    std::vector<MetricFamily> families;
    for (MetricFamily* family : {&lost, &utilization, &used, &total, &power}) {
      if (!family->metric.empty()) families.push_back(std::move(*family));
    }
    return families;
  }

 private:
  static MetricFamily Family(const char* name, const char* help) {
    MetricFamily family;
    family.name = name;
    family.help = help;
    family.type = prometheus::MetricType::Gauge;
    return family;
  }

  static void Add(MetricFamily& family, const CudaDevice& gpu, double value) {
    prometheus::ClientMetric metric;
    metric.label = {{"gpu", std::to_string(gpu.index())}};
    metric.gauge.value = value;
    family.metric.push_back(std::move(metric));
  }

  const Devices& devices_;
  const std::unique_ptr<GpuUsageReader> reader_;
};

}  // namespace

std::shared_ptr<prometheus::Collectable> MakeGpuMetricsCollector(
    const Devices& devices, std::unique_ptr<GpuUsageReader> reader) {
  return std::make_shared<Collector>(devices, std::move(reader));
}

}  // namespace espalier::service
