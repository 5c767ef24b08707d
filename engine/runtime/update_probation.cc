#include "engine/runtime/update_probation.h"

#include "absl/strings/str_cat.h"

namespace espalier::runtime {

Conduct ConductOf(const ServedVersion& version) {
  const VersionStatistics& statistics = version.statistics();
  const DurationCounter& compute = statistics.phases[static_cast<int>(Phase::kComputeInfer)];
  Conduct conduct;
  conduct.answered = compute.count.load(std::memory_order_relaxed);
  conduct.compute_nanos = compute.nanos.load(std::memory_order_relaxed);
  conduct.failed =
      statistics.by_reason[static_cast<int>(FailureReason::kOther)].load(std::memory_order_relaxed);
  conduct.nonfinite_batches = version.nonfinite_batches();
  return conduct;
}

std::string Breach(const ProbationOptions& terms, const Conduct& old, const Conduct& now,
                   bool last) {
  if (now.nonfinite_batches > 0) {
    return absl::StrCat("answers of ", now.nonfinite_batches,
                        " batches have a NaN or an infinity that their inputs had not");
  }
  if (now.answered + now.failed < kJudgedRequests && !last) return "";
  if (now.error_rate() > old.error_rate() + terms.max_error_rate) {
    return absl::StrCat(now.failed, " of ", now.failed + now.answered,
                        " requests failed, the version before had an error rate of ",
                        old.error_rate(), ", ", terms.max_error_rate, " more are allowed");
  }
  if (terms.max_latency_ratio <= 0 || now.answered < kJudgedRequests ||
      old.answered < kJudgedRequests)
    return "";
  const auto mean = [](const Conduct& conduct) {
    return static_cast<double>(conduct.compute_nanos) / static_cast<double>(conduct.answered);
  };
  if (mean(now) <= terms.max_latency_ratio * mean(old)) return "";
  return absl::StrCat("a request takes ", mean(now) * 1e-3, " us, ", mean(old) * 1e-3,
                      " before, at most ", terms.max_latency_ratio, " times that is allowed");
}

}  // namespace espalier::runtime
