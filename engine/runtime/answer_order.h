// answer_order.h — answers of batches that ran side by side, let go in the order in which the batches were
// closed (dynamic_batching.preserve_ordering).
//
// Only outcomes wait here; their instances go on. Requests that were never executed are not in any order:
// they are answered when they expire or are cancelled.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "engine/runtime/infer_request.h"

namespace espalier::runtime {

// Of an execution, for one of its requests.
struct Outcome {
  InferRequest* request = nullptr;
  absl::Status status;
};

class AnswerOrder {
 public:
  using Answer = std::function<void(Outcome)>;
  explicit AnswerOrder(Answer answer) : answer_(std::move(answer)) {}

  // The outcomes of batch `sequence`; every number from 0 on is released once. Answers them, and those
  // that waited for them, unless an earlier batch is missing. Answers leave one at a time.
  void Release(uint64_t sequence, std::vector<Outcome> outcomes);

 private:
  const Answer answer_;
  std::mutex mutex_;
  std::map<uint64_t, std::vector<Outcome>> held_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  bool releasing_ ABSL_GUARDED_BY(mutex_) = false;  // a thread is at it, and will look again
};

}  // namespace espalier::runtime
