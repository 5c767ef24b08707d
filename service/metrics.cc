#include "service/metrics.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "prometheus/metric_family.h"
#include "service/metric_family.h"
#include "service/process_usage.h"
#include "service/status.h"

namespace espalier::service {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;

Labels LabelsOf(const runtime::ServedVersion& version) {
  return {{"model", version.name()}, {"version", absl::StrCat(version.version())}};
}

class Collector final : public prometheus::Collectable {
 public:
  Collector(const ServiceState& state, std::string commit)
      : state_(state), commit_(std::move(commit)) {}

  std::vector<MetricFamily> Collect() const override {
    std::vector<MetricFamily> families;
    CollectServer(families);
    CollectProcess(families);
    CollectRpcs(families);
    CollectVersions(families);
    CollectQueuesAndMemory(families);
    CollectDeviceWork(families);
    CollectLatencies(families);
    return families;
  }

 private:
  static void AddOne(std::vector<MetricFamily>& families, const char* name, const char* help,
                     MetricType type, double value, Labels labels = {}) {
    Family family(name, help, type);
    family.Add(std::move(labels), value);
    family.MoveTo(families);
  }

  void CollectServer(std::vector<MetricFamily>& families) const {
    const auto gauge = [&](const char* name, const char* help, int64_t value) {
      AddOne(families, name, help, MetricType::Gauge, static_cast<double>(value));
    };
    const InFlight& in_flight = state_.telemetry.in_flight;
    AddOne(families, "espalier_build_info", "Version of the server", MetricType::Gauge, 1,
           {{"version", ESPALIER_VERSION}, {"commit", commit_}});
    gauge("espalier_ready", "1 when the server takes requests", state_.ready() ? 1 : 0);
    gauge("espalier_requests_in_flight", "ModelInfer requests between message and answer",
          in_flight.requests());
    gauge("espalier_requests_in_flight_limit", "As many are let in; 0: no limit",
          in_flight.limits().max_requests);
    gauge("espalier_request_bytes_in_flight", "Bytes of their messages", in_flight.bytes());
    gauge("espalier_request_bytes_in_flight_limit", "As many are let in; 0: no limit",
          in_flight.limits().max_bytes);
    Family refused("espalier_requests_refused_total",
                   "Requests, and streams, turned away by a limit on what is in flight",
                   MetricType::Counter);
    refused.Add({{"reason", "requests_in_flight"}}, Value(in_flight.refused_for_requests()));
    refused.Add({{"reason", "bytes_in_flight"}}, Value(in_flight.refused_for_bytes()));
    refused.Add({{"reason", "streams"}}, Value(state_.streams.refused()));
    refused.MoveTo(families);
    Family loads("espalier_model_loads_total",
                 "Loads of a model that have ended, see the repository index for reasons",
                 MetricType::Counter);
    const auto by_code = state_.models.loads_by_code();
    for (size_t code = 0; code < by_code.size(); ++code) {
      // All of them from the start: the increase of a series that appears is none.
      loads.Add({{"code", CodeName(static_cast<int>(code))}}, static_cast<double>(by_code[code]));
    }
    loads.MoveTo(families);
  }

  // Under the names that every Prometheus client library gives them.
  static void CollectProcess(std::vector<MetricFamily>& families) {
    const std::optional<ProcessUsage> usage = ReadProcessUsage();
    if (!usage) return;
    const auto gauge = [&](const char* name, const char* help, double value) {
      AddOne(families, name, help, MetricType::Gauge, value);
    };
    AddOne(families, "process_cpu_seconds_total", "User and system time", MetricType::Counter,
           usage->cpu_seconds);
    gauge("process_resident_memory_bytes", "Resident memory",
          static_cast<double>(usage->resident_bytes));
    gauge("process_virtual_memory_bytes", "Virtual memory",
          static_cast<double>(usage->virtual_bytes));
    gauge("process_start_time_seconds", "Start, since the epoch", usage->start_seconds);
    gauge("process_threads", "Threads", static_cast<double>(usage->threads));
    gauge("process_open_fds", "Open file descriptors", static_cast<double>(usage->open_files));
    if (usage->max_files > 0) {
      gauge("process_max_fds", "As many may be open", static_cast<double>(usage->max_files));
    }
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
    Family failures("espalier_request_failures_total",
                    "Requests that reached the model and failed, by reason", MetricType::Counter);
    Family batches("espalier_batch_size", "Items in a run of the model", MetricType::Histogram);
    Family padding("espalier_padding_items_total",
                   "Items executed without a request, to reach an allowed batch size",
                   MetricType::Counter);
    for (const runtime::VersionHandle& version : state_.models.AllReady()) {
      const Labels labels = LabelsOf(*version);
      const runtime::VersionStatistics& statistics = version->statistics();
      for (size_t code = 0; code < statistics.by_code.size(); ++code) {
        const double value = Value(statistics.by_code[code]);
        if (value == 0 && code != 0) continue;  // OK is always there: a rate needs its zero
        requests.Add(With(labels, "code", CodeName(static_cast<int>(code))), value);
      }
      for (int reason = 0; reason < runtime::kFailureReasons; ++reason) {
        failures.Add(With(labels, "reason", runtime::kFailureReasonNames[reason]),
                     Value(statistics.by_reason[reason]));
      }
      batches.Add(labels, statistics.by_batch_size());
      inferences.Add(labels, Value(statistics.inferences));
      executions.Add(labels, Value(statistics.executions));
      padding.Add(labels, Value(statistics.padding_items));
    }
    for (Family* family : {&requests, &failures, &inferences, &executions, &batches, &padding})
      family->MoveTo(families);
  }

  void CollectQueuesAndMemory(std::vector<MetricFamily>& families) const {
    Family pending("espalier_queue_pending", "Requests that wait to be executed",
                   MetricType::Gauge);
    Family priority("espalier_queue_priority_pending",
                    "Requests that wait to be executed, by priority level", MetricType::Gauge);
    Family resident("espalier_model_resident_weight_bytes", "Weights in memory, in their layouts",
                    MetricType::Gauge);
    Family dense("espalier_model_dense_weight_bytes", "The same weights as dense tensors",
                 MetricType::Gauge);
    Family arena("espalier_model_arena_bytes", "Activations and buffers of all instances",
                 MetricType::Gauge);
    Family load("espalier_model_load_seconds", "Reading, planning and preparing the model",
                MetricType::Gauge);
    for (const runtime::VersionHandle& version : state_.models.AllReady()) {
      const Labels labels = LabelsOf(*version);
      pending.Add(labels, static_cast<double>(version->pending()));
      for (const auto& level : version->PendingByLevel()) {
        if (level.level == 0) continue;  // the model has no levels
        priority.Add(With(labels, "priority", absl::StrCat(level.level)),
                     static_cast<double>(level.requests));
      }
      resident.Add(labels, static_cast<double>(version->model().weight_bytes()));
      dense.Add(labels, static_cast<double>(version->model().dense_weight_bytes()));
      arena.Add(labels, static_cast<double>(version->arena_bytes()));
      load.Add(labels, version->load_seconds());
    }
    for (Family* family : {&pending, &priority, &resident, &dense, &arena, &load})
      family->MoveTo(families);
  }

  // Of models on GPUs, from their first run on.
  void CollectDeviceWork(std::vector<MetricFamily>& families) const {
    Family seconds("espalier_model_timed_device_seconds_total",
                   "Time on the GPU, of the runs that were timed", MetricType::Counter);
    Family flops("espalier_model_timed_flops_total",
                 "Operations with non-zero weights, in these runs", MetricType::Counter);
    Family bytes("espalier_model_timed_bytes_total",
                 "Weights, inputs and outputs of linear layers, in these runs",
                 MetricType::Counter);
    Family flops_rate("espalier_model_flops_per_second", "Achieved on the GPU since the load",
                      MetricType::Gauge);
    Family bytes_rate("espalier_model_bytes_per_second", "Achieved on the GPU since the load",
                      MetricType::Gauge);
    Family peak(
        "espalier_model_peak_ratio",
        "Share of the arithmetic and of the memory bandwidth that the GPU reached at its best",
        MetricType::Gauge);
    for (const runtime::VersionHandle& version : state_.models.AllReady()) {
      const auto work = version->model().device_work();
      if (work.seconds <= 0) continue;
      const Labels labels = LabelsOf(*version);
      seconds.Add(labels, work.seconds);
      flops.Add(labels, work.flops);
      bytes.Add(labels, work.bytes);
      flops_rate.Add(labels, work.flops / work.seconds);
      bytes_rate.Add(labels, work.bytes / work.seconds);
      const auto share = [&](const char* bound, double done, double best) {
        if (best > 0) peak.Add(With(labels, "bound", bound), done / work.seconds / best);
      };
      share("compute", work.flops, work.peak.flops);
      share("memory", work.bytes, work.peak.bytes);
    }
    for (Family* family : {&seconds, &flops, &bytes, &flops_rate, &bytes_rate, &peak})
      family->MoveTo(families);
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
  const std::string commit_;
};

}  // namespace

std::shared_ptr<prometheus::Collectable> MakeMetricsCollector(const ServiceState& state,
                                                              std::string commit) {
  return std::make_shared<Collector>(state, std::move(commit));
}

}  // namespace espalier::service
