#include "service/metrics.h"

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "prometheus/client_metric.h"
#include "prometheus/metric_family.h"
#include "service/status.h"

namespace espalier::service {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

// A family under construction; one without series is left out.
class Family {
 public:
  Family(const char* name, const char* help, MetricType type) {
    family_.name = name;
    family_.help = help;
    family_.type = type;
  }

  void Add(Labels labels, double value) {
    ClientMetric metric;
    metric.label = std::move(labels);
    (family_.type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
    family_.metric.push_back(std::move(metric));
  }

  void Add(Labels labels, const runtime::LatencyHistogram& histogram) {
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
    metric.histogram.bucket.push_back({snapshot.count, std::numeric_limits<double>::infinity()});
    family_.metric.push_back(std::move(metric));
  }

  void MoveTo(std::vector<MetricFamily>& families) {
    if (!family_.metric.empty()) families.push_back(std::move(family_));
  }

 private:
  MetricFamily family_;
};

double Value(const std::atomic<uint64_t>& counter) {
  return static_cast<double>(counter.load(std::memory_order_relaxed));
}

class Collector final : public prometheus::Collectable {
 public:
  explicit Collector(const ServiceState& state) : state_(state) {}

  std::vector<MetricFamily> Collect() const override {
    std::vector<MetricFamily> families;
    CollectServer(families);
    CollectRpcs(families);
    CollectVersions(families);
    CollectLatencies(families);
    return families;
  }

 private:
  void CollectServer(std::vector<MetricFamily>& families) const {
    const auto add = [&](const char* name, const char* help, MetricType type, double value,
                         Labels labels = {}) {
      Family family(name, help, type);
      family.Add(std::move(labels), value);
      family.MoveTo(families);
    };
    const InFlight& in_flight = state_.telemetry.in_flight;
    add("espalier_build_info", "Version of the server", MetricType::Gauge, 1,
        {{"version", ESPALIER_VERSION}});
    add("espalier_ready", "1 when the server takes requests", MetricType::Gauge,
        state_.ready() ? 1 : 0);
    add("espalier_requests_in_flight", "ModelInfer requests between message and answer",
        MetricType::Gauge, static_cast<double>(in_flight.requests()));
    add("espalier_request_bytes_in_flight", "Bytes of their messages", MetricType::Gauge,
        static_cast<double>(in_flight.bytes()));
    add("espalier_model_load_failures_total",
        "Loads that failed, see the repository index for reasons", MetricType::Counter,
        static_cast<double>(state_.models.failed_loads()));
  }

  void CollectRpcs(std::vector<MetricFamily>& families) const {
    Family count("espalier_rpcs_total", "Answered RPCs", MetricType::Counter);
    Family latency("espalier_rpc_duration_seconds", "Arrival to answer", MetricType::Histogram);
    for (int rpc = 0; rpc < kRpcs; ++rpc) {
      const RpcCounters& counters = state_.telemetry.rpcs[rpc];
      bool used = false;
      for (size_t code = 0; code < counters.by_code.size(); ++code) {
        const double value = Value(counters.by_code[code]);
        if (value == 0) continue;
        used = true;
        count.Add({{"rpc", kRpcNames[rpc]}, {"code", CodeName(static_cast<int>(code))}}, value);
      }
      if (used) latency.Add({{"rpc", kRpcNames[rpc]}}, counters.latency);
    }
    count.MoveTo(families);
    latency.MoveTo(families);
  }

  void CollectVersions(std::vector<MetricFamily>& families) const {
    Family requests("espalier_requests_total",
                    "ModelInfer requests that reached the model, by answer", MetricType::Counter);
    Family inferences("espalier_inferences_total", "Items inferred: a request of batch 8 counts 8",
                      MetricType::Counter);
    Family executions("espalier_executions_total", "Runs of the model", MetricType::Counter);
    Family pending("espalier_queue_pending", "Requests that wait to be executed",
                   MetricType::Gauge);
    Family resident("espalier_model_resident_weight_bytes", "Weights in memory, in their layouts",
                    MetricType::Gauge);
    Family dense("espalier_model_dense_weight_bytes", "The same weights as dense tensors",
                 MetricType::Gauge);
    Family arena("espalier_model_arena_bytes", "Activations and buffers of all instances",
                 MetricType::Gauge);
    Family load("espalier_model_load_seconds", "Reading, planning and preparing the model",
                MetricType::Gauge);
    for (const runtime::VersionHandle& version : state_.models.AllReady()) {
      const Labels labels = {{"model", version->name()},
                             {"version", absl::StrCat(version->version())}};
      const runtime::VersionStatistics& statistics = version->statistics();
      for (size_t code = 0; code < statistics.by_code.size(); ++code) {
        const double value = Value(statistics.by_code[code]);
        if (value == 0 && code != 0) continue;  // OK is always there: a rate needs its zero
        Labels with_code = labels;
        with_code.push_back({"code", CodeName(static_cast<int>(code))});
        requests.Add(std::move(with_code), value);
      }
      inferences.Add(labels, Value(statistics.inferences));
      executions.Add(labels, Value(statistics.executions));
      pending.Add(labels, static_cast<double>(version->pending()));
      resident.Add(labels, static_cast<double>(version->model().weight_bytes()));
      dense.Add(labels, static_cast<double>(version->model().dense_weight_bytes()));
      arena.Add(labels, static_cast<double>(version->arena_bytes()));
      load.Add(labels, version->load_seconds());
    }
    for (Family* family :
         {&requests, &inferences, &executions, &pending, &resident, &dense, &arena, &load}) {
      family->MoveTo(families);
    }
  }

  void CollectLatencies(std::vector<MetricFamily>& families) const {
    Family request("espalier_request_duration_seconds", "ModelInfer, arrival to answer",
                   MetricType::Histogram);
    Family phases("espalier_phase_duration_seconds", "ModelInfer by phase", MetricType::Histogram);
    for (const auto& [model, latency] : state_.models.Latencies()) {
      request.Add({{"model", model}}, latency->request);
      for (int phase = 0; phase < runtime::kPhases; ++phase) {
        phases.Add({{"model", model}, {"phase", runtime::kPhaseNames[phase]}},
                   latency->phases[phase]);
      }
    }
    request.MoveTo(families);
    phases.MoveTo(families);
  }

  const ServiceState& state_;
};

}  // namespace

std::shared_ptr<prometheus::Collectable> MakeMetricsCollector(const ServiceState& state) {
  return std::make_shared<Collector>(state);
}

}  // namespace espalier::service
