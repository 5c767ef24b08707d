#include "service/update_metrics.h"

#include <string>
#include <utility>
#include <vector>

#include "service/metric_family.h"

namespace espalier::service {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;
using runtime::UpdateStatistics;

// One number of every model.
struct Series {
  const char* name;
  const char* help;
  MetricType type;
  double (*value)(const UpdateStatistics& model);
};

constexpr auto kCounter = MetricType::Counter;
constexpr auto kGauge = MetricType::Gauge;

constexpr Series kSeries[] = {
    {"espalier_update_received_bytes_total", "Bytes of deltas received", kCounter,
     [](const UpdateStatistics& model) { return static_cast<double>(model.received_bytes); }},
    {"espalier_update_staged_total", "Deltas that passed every check", kCounter,
     [](const UpdateStatistics& model) { return static_cast<double>(model.staged); }},
    {"espalier_update_activated_total", "Versions that began to serve", kCounter,
     [](const UpdateStatistics& model) { return static_cast<double>(model.activated); }},
    {"espalier_update_rolled_back_total", "Versions given up for an earlier one", kCounter,
     [](const UpdateStatistics& model) { return static_cast<double>(model.rolled_back); }},
    {"espalier_update_quarantined_total", "Versions that failed while they served", kCounter,
     [](const UpdateStatistics& model) { return static_cast<double>(model.quarantined); }},
    {"espalier_update_stage_seconds_total", "Time from complete deltas to staged versions",
     kCounter, [](const UpdateStatistics& model) { return model.stage_seconds; }},
    {"espalier_update_commit_seconds_total", "Time of activations: decision and flip", kCounter,
     [](const UpdateStatistics& model) { return model.commit_seconds; }},
    {"espalier_update_flip_seconds_total",
     "The part of commits in which a request may have to wait, after the decision", kCounter,
     [](const UpdateStatistics& model) { return model.flip_seconds; }},
    {"espalier_update_version", "Number of the active version", kGauge,
     [](const UpdateStatistics& model) { return static_cast<double>(model.version); }},
    {"espalier_update_sequence", "Sequence of the active version's delta; 0: it has none", kGauge,
     [](const UpdateStatistics& model) { return static_cast<double>(model.sequence); }},
    {"espalier_update_probation", "1 while the active version is not confirmed", kGauge,
     [](const UpdateStatistics& model) { return model.on_probation ? 1.0 : 0.0; }},
};

class Collector final : public prometheus::Collectable {
 public:
  explicit Collector(const runtime::UpdateManager& manager) : manager_(manager) {}

  std::vector<MetricFamily> Collect() const override {
    const std::vector<UpdateStatistics> models = manager_.Statistics();
    std::vector<MetricFamily> families;
    for (const Series& series : kSeries) {
      Family family(series.name, series.help, series.type);
      for (const UpdateStatistics& model : models)
        family.Add({{"model", model.model}}, series.value(model));
      family.MoveTo(families);
    }
    Family refused("espalier_update_refused_total", "Deltas that failed a check, by reason",
                   MetricType::Counter);
    Family shadow("espalier_update_shadow_total",
                  "Updates that were written into the second copy of the weights, by how",
                  MetricType::Counter);
    Family replans("espalier_update_replans_total",
                   "Weights planned again as their structure had drifted, by outcome",
                   MetricType::Counter);
    for (const UpdateStatistics& model : models) {
      for (const auto& [reason, count] : model.refused)
        refused.Add({{"model", model.model}, {"reason", reason}}, static_cast<double>(count));
      shadow.Add({{"model", model.model}, {"how", "edited"}}, static_cast<double>(model.edited));
      shadow.Add({{"model", model.model}, {"how", "rebuilt"}}, static_cast<double>(model.rebuilt));
      const std::pair<const char*, uint64_t> outcomes[] = {{"changed", model.replans_changed},
                                                           {"kept", model.replans_kept},
                                                           {"failed", model.replans_failed}};
      for (const auto& [outcome, count] : outcomes)
        replans.Add({{"model", model.model}, {"outcome", outcome}}, static_cast<double>(count));
    }
    refused.MoveTo(families);
    shadow.MoveTo(families);
    replans.MoveTo(families);
    return families;
  }

 private:
  const runtime::UpdateManager& manager_;
};

}  // namespace

std::shared_ptr<prometheus::Collectable> MakeUpdateMetricsCollector(
    const runtime::UpdateManager& manager) {
  return std::make_shared<Collector>(manager);
}

}  // namespace espalier::service
