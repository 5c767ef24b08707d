#include "engine/runtime/batching_policy.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/formats/model_settings.h"

namespace espalier::runtime {
namespace {

// A day: longer is for ever, and its nanoseconds would overflow.
constexpr uint64_t kLongestMicros = 86'400'000'000;

QueuePolicy PolicyOf(const inference::ModelQueuePolicy& from) {
  QueuePolicy policy;
  policy.max_pending = from.max_queue_size();
  policy.default_timeout_micros = from.default_timeout_microseconds() > kLongestMicros
                                      ? 0
                                      : static_cast<int64_t>(from.default_timeout_microseconds());
  policy.allow_timeout_override = from.allow_timeout_override();
  policy.delays_expired = from.timeout_action() == inference::ModelQueuePolicy::DELAY;
  return policy;
}

absl::Status CheckSizes(const BatchingPolicy& policy, const std::string& model) {
  if (!policy.preferred.empty() && policy.preferred.back() > policy.max_batch_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model '", model, "': dynamic_batching.preferred_batch_size is ", policy.preferred.back(),
        ", expected at most max_batch_size, ", policy.max_batch_size));
  }
  if (policy.pads_to_preferred && policy.preferred.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model '", model, "': parameter 'allowed_batch_sizes' is 'preferred', expected ",
        "at least one dynamic_batching.preferred_batch_size"));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t QueuePolicy::TimeoutMicros(int64_t asked_micros) const {
  if (!allow_timeout_override || asked_micros <= 0 ||
      asked_micros > static_cast<int64_t>(kLongestMicros)) {
    return default_timeout_micros;
  }
  return default_timeout_micros > 0 ? std::min(default_timeout_micros, asked_micros) : asked_micros;
}

const QueuePolicy& BatchingPolicy::policy_of(uint64_t level) const {
  const auto found = level_policies.find(level);
  return found == level_policies.end() ? default_policy : found->second;
}

int64_t BatchingPolicy::padded(int64_t items) const {
  if (!pads_to_preferred) return items;
  return *std::lower_bound(preferred.begin(), preferred.end(), items);
}

absl::StatusOr<BatchingPolicy> BatchingPolicy::Create(const inference::ModelConfig& config,
                                                      int64_t default_max_pending) {
  auto settings = formats::ReadModelSettings(config);
  if (!settings.ok()) return settings.status();
  const auto& batching = config.dynamic_batching();  // the empty one when there is none
  BatchingPolicy policy;
  policy.max_batch_size = std::max(config.max_batch_size(), 1);
  policy.preferred.assign(batching.preferred_batch_size().begin(),
                          batching.preferred_batch_size().end());
  std::sort(policy.preferred.begin(), policy.preferred.end());
  policy.preferred.erase(std::unique(policy.preferred.begin(), policy.preferred.end()),
                         policy.preferred.end());
  policy.max_delay_nanos = static_cast<int64_t>(
      std::min(uint64_t{batching.max_queue_delay_microseconds()}, kLongestMicros) * 1000);
  policy.pads_to_preferred = settings->pads_to_preferred;
  policy.preserves_order = batching.preserve_ordering();
  policy.levels = batching.priority_levels();
  policy.default_level = batching.default_priority_level();
  policy.default_policy = PolicyOf(batching.default_queue_policy());
  for (const auto& [level, from] : batching.priority_queue_policy())
    policy.level_policies[level] = PolicyOf(from);
  policy.max_pending_elsewhere = default_max_pending;
  if (absl::Status status = CheckSizes(policy, config.name()); !status.ok()) return status;
  return policy;
}

}  // namespace espalier::runtime
