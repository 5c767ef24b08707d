// batching_policy.h — what a model's config says about merging and waiting, in the batcher's terms.
//
//   config.pbtxt                              here
//   no dynamic_batching, or an empty one      what waits when an instance is free runs together, up to
//                                             max_batch_size; how long for company, the batcher decides
//   preferred_batch_size                      preferred: a batch is closed as soon as its requests add up
//                                             to one of these, the largest that they can
//   max_queue_delay_microseconds              how long the oldest request waits for that, or for a full batch
//   preserve_ordering                         answers leave in the order in which batches were closed
//   priority_levels, default_priority_level   1 is the highest; a request without a level, or with one that
//                                             there is not, has the default one
//   default_queue_policy                      of every level that priority_queue_policy does not name
//   parameter allowed_batch_sizes             see formats/model_settings.h
//
// Triton merges nothing without dynamic_batching; here the default is to merge, because an idle server
// answers no later for it and a busy one several times as many.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/formats/model_config.h"

namespace espalier::runtime {

// How requests of one priority level wait. Triton's ModelQueuePolicy.
struct QueuePolicy {
  int64_t max_pending = 0;             // requests that may wait; 0: no limit of its own
  int64_t default_timeout_micros = 0;  // 0: none
  bool allow_timeout_override = false;
  bool delays_expired = false;  // DELAY: serve them after the others; otherwise refuse them

  // What a request that asks for `asked_micros` (0: nothing) gets; 0: no timeout. A request can only
  // shorten its time, and only where the policy allows that. (Triton compares with the default even
  // where that is 0, none, so that no request could have a timeout then.)
  int64_t TimeoutMicros(int64_t asked_micros) const;
};

struct BatchingPolicy {
  int64_t max_batch_size = 1;      // at least 1
  std::vector<int64_t> preferred;  // ascending, each once
  int64_t max_delay_nanos = 0;
  bool pads_to_preferred = false;  // only preferred sizes are executed, missing items are zeros
  bool preserves_order = false;
  uint64_t levels = 0;  // 0: no levels, every request has level 0
  uint64_t default_level = 0;
  QueuePolicy default_policy;
  std::map<uint64_t, QueuePolicy> level_policies;
  // Of all levels without a max_pending of their own together; 0: no limit.
  int64_t max_pending_elsewhere = 0;

  // Largest batch of more than one request, and of one: a request alone may exceed what is preferred.
  int64_t largest_merged() const { return preferred.empty() ? max_batch_size : preferred.back(); }
  int64_t largest_request() const { return pads_to_preferred ? preferred.back() : max_batch_size; }
  // Whether a request may be executed the moment it comes.
  bool runs_at_once() const { return max_delay_nanos == 0 && !pads_to_preferred; }
  // Whether the config leaves to the batcher how long requests wait for company.
  bool adapts() const { return max_delay_nanos == 0 && preferred.empty(); }

  const QueuePolicy& policy_of(uint64_t level) const;
  uint64_t level_of(uint64_t asked) const {
    return asked == 0 || asked > levels ? default_level : asked;
  }
  // The number of items that a batch of `items` is executed with.
  int64_t padded(int64_t items) const;

  // `config` is complete. `default_max_pending` applies to levels without a max_queue_size; 0: no
  // limit. InvalidArgument for sizes that contradict max_batch_size or each other.
  static absl::StatusOr<BatchingPolicy> Create(const inference::ModelConfig& config,
                                               int64_t default_max_pending);
};

}  // namespace espalier::runtime
