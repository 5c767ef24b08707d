#include "service/metric_family.h"

#include <limits>

namespace espalier::service {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricType;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Bounds of batch sizes: powers of two up to here. The same for all models, so that they add up.
constexpr size_t kLargestBatchBound = 1024;

}  // namespace

Family::Family(const char* name, const char* help, MetricType type) {
  family_.name = name;
  family_.help = help;
  family_.type = type;
}

void Family::Add(Labels labels, double value) {
  ClientMetric metric;
  metric.label = std::move(labels);
  (family_.type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  family_.metric.push_back(std::move(metric));
}

void Family::Add(Labels labels, const runtime::LatencyHistogram& histogram) {
  const auto snapshot = histogram.Read();
  ClientMetric metric;
  metric.label = std::move(labels);
  metric.histogram.sample_count = snapshot.count;
  metric.histogram.sample_sum = static_cast<double>(snapshot.nanos) * 1e-9;
  uint64_t cumulative = 0;
  const auto bounds = runtime::LatencyHistogram::Bounds();
  for (size_t i = 0; i < bounds.size(); ++i) {
    cumulative += snapshot.buckets[i];
    metric.histogram.bucket.push_back({cumulative, static_cast<double>(bounds[i]) * 1e-9});
  }
  metric.histogram.bucket.push_back({snapshot.count, kInfinity});
  family_.metric.push_back(std::move(metric));
}

void Family::Add(Labels labels,
                 absl::Span<const runtime::VersionStatistics::Execution> by_batch_size) {
  ClientMetric metric;
  metric.label = std::move(labels);
  uint64_t executions = 0, items = 0;
  size_t size = 0;
  for (size_t bound = 1; bound <= kLargestBatchBound; bound *= 2) {
    for (; size <= bound && size < by_batch_size.size(); ++size) {
      const uint64_t count = by_batch_size[size].count.load(std::memory_order_relaxed);
      executions += count;
      items += count * size;
    }
    metric.histogram.bucket.push_back({executions, static_cast<double>(bound)});
  }
  for (; size < by_batch_size.size(); ++size) {
    const uint64_t count = by_batch_size[size].count.load(std::memory_order_relaxed);
    executions += count;
    items += count * size;
  }
  metric.histogram.bucket.push_back({executions, kInfinity});
  metric.histogram.sample_count = executions;
  metric.histogram.sample_sum = static_cast<double>(items);
  family_.metric.push_back(std::move(metric));
}

void Family::MoveTo(std::vector<prometheus::MetricFamily>& families) {
  if (!family_.metric.empty()) families.push_back(std::move(family_));
}

}  // namespace espalier::service
