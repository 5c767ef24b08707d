#include <mutex>

#include "absl/strings/str_cat.h"
#include "prometheus/metric_family.h"
#include "service/metric_family.h"
#include "service/metrics.h"
#include "service/process_usage.h"

namespace espalier::service {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;
using runtime::FailureReason;
using runtime::Phase;

// Triton's reasons, and which of ours each covers. Triton counts an expired gRPC deadline, which
// reaches it as a cancellation, among the cancelled.
struct Reason {
  const char* name;
  std::vector<FailureReason> covers;
};
const std::vector<Reason>& Reasons() {
  static const auto* const reasons = new std::vector<Reason>{
      {"REJECTED", {FailureReason::kQueueFull, FailureReason::kTimeout}},
      {"CANCELED", {FailureReason::kCancelled, FailureReason::kDeadline}},
      {"BACKEND", {FailureReason::kOther}},
      {"OTHER", {FailureReason::kInvalid, FailureReason::kUnavailable}},
  };
  return *reasons;
}

double Micros(const std::atomic<uint64_t>& nanos) { return Value(nanos) / 1e3; }

class TritonCollector final : public prometheus::Collectable {
 public:
  explicit TritonCollector(const ServiceState& state) : state_(state) {}

  std::vector<MetricFamily> Collect() const override {
    std::vector<MetricFamily> families;
    CollectVersions(families);
    CollectHost(families);
    return families;
  }

 private:
  void CollectVersions(std::vector<MetricFamily>& families) const {
    Family success("nv_inference_request_success",
                   "Number of successful inference requests, all batch sizes", MetricType::Counter);
    Family failure("nv_inference_request_failure",
                   "Number of failed inference requests, all batch sizes", MetricType::Counter);
    Family inferences("nv_inference_count", "Number of inferences performed", MetricType::Counter);
    Family executions("nv_inference_exec_count", "Number of model executions performed",
                      MetricType::Counter);
    Family request("nv_inference_request_duration_us",
                   "Cumulative inference request duration in microseconds", MetricType::Counter);
    Family phases[] = {
        {"nv_inference_queue_duration_us", "Cumulative inference queuing duration in microseconds",
         MetricType::Counter},
        {"nv_inference_compute_input_duration_us",
         "Cumulative compute input duration in microseconds", MetricType::Counter},
        {"nv_inference_compute_infer_duration_us",
         "Cumulative compute inference duration in microseconds", MetricType::Counter},
        {"nv_inference_compute_output_duration_us",
         "Cumulative inference compute output duration in microseconds", MetricType::Counter}};
    static_assert(std::size(phases) == runtime::kPhases);
    Family pending("nv_inference_pending_request_count",
                   "Instantaneous number of pending requests awaiting execution",
                   MetricType::Gauge);
    Family load("nv_model_load_duration_secs", "Model load time in seconds", MetricType::Gauge);
    for (const runtime::VersionHandle& version : state_.models.AllReady()) {
      const Labels labels = {{"model", version->name()},
                             {"version", absl::StrCat(version->version())}};
      const runtime::VersionStatistics& statistics = version->statistics();
      success.Add(labels, Value(statistics.success.count));
      for (const Reason& reason : Reasons()) {
        double count = 0;
        for (FailureReason covered : reason.covers) {
          count += Value(statistics.by_reason[static_cast<int>(covered)]);
        }
        failure.Add(With(labels, "reason", reason.name), count);
      }
      inferences.Add(labels, Value(statistics.inferences));
      executions.Add(labels, Value(statistics.executions));
      request.Add(labels, Micros(statistics.success.nanos));
      for (int phase = 0; phase < runtime::kPhases; ++phase) {
        phases[phase].Add(labels, Micros(statistics.phases[phase].nanos));
      }
      pending.Add(labels, static_cast<double>(version->pending()));
      load.Add(labels, version->load_seconds());
    }
    for (Family* family : {&success, &failure, &inferences, &executions, &request, &phases[0],
                           &phases[1], &phases[2], &phases[3], &pending, &load}) {
      family->MoveTo(families);
    }
  }

  void CollectHost(std::vector<MetricFamily>& families) const {
    const std::optional<HostUsage> now = ReadHostUsage();
    if (!now) return;
    Family utilization("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", MetricType::Gauge);
    Family total("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes",
                 MetricType::Gauge);
    Family used("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", MetricType::Gauge);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const uint64_t all = now->all_ticks - host_.all_ticks;
      // Since the last scrape; two of them within a tick see the same.
      if (all > 0) {
        utilization_ =
            static_cast<double>(now->busy_ticks - host_.busy_ticks) / static_cast<double>(all);
        host_ = *now;
      }
      utilization.Add({}, utilization_);
    }
    total.Add({}, static_cast<double>(now->memory_total_bytes));
    used.Add({}, static_cast<double>(now->memory_total_bytes - now->memory_available_bytes));
    for (Family* family : {&utilization, &total, &used}) family->MoveTo(families);
  }

  const ServiceState& state_;
  mutable std::mutex mutex_;
  mutable HostUsage host_ ABSL_GUARDED_BY(mutex_);
  mutable double utilization_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace

std::shared_ptr<prometheus::Collectable> MakeTritonMetricsCollector(const ServiceState& state) {
  return std::make_shared<TritonCollector>(state);
}

}  // namespace espalier::service
