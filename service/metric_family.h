// metric_family.h — one Prometheus family under construction.
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "engine/runtime/statistics.h"
#include "prometheus/client_metric.h"
#include "prometheus/metric_family.h"

namespace espalier::service {

using Labels = std::vector<prometheus::ClientMetric::Label>;

inline Labels With(Labels labels, const char* name, std::string value) {
  labels.push_back({name, std::move(value)});
  return labels;
}

inline double Value(const std::atomic<uint64_t>& counter) {
  return static_cast<double>(counter.load(std::memory_order_relaxed));
}

class Family {
 public:
  Family(const char* name, const char* help, prometheus::MetricType type);

  void Add(Labels labels, double value);
  void Add(Labels labels, const runtime::LatencyHistogram& histogram);  // in seconds
  // Of executions by the number of items in each.
  void Add(Labels labels, absl::Span<const runtime::VersionStatistics::Execution> by_batch_size);

  // To the end of `families`; a family without series is left out.
  void MoveTo(std::vector<prometheus::MetricFamily>& families);

 private:
  prometheus::MetricFamily family_;
};

}  // namespace espalier::service
