#include "engine/runtime/answer_order.h"

#include <utility>

namespace espalier::runtime {

void AnswerOrder::Release(uint64_t sequence, std::vector<Outcome> outcomes) {
  std::unique_lock lock(mutex_);
  held_.emplace(sequence, std::move(outcomes));
  if (releasing_) return;
  releasing_ = true;
  while (!held_.empty() && held_.begin()->first == next_) {
    std::vector<Outcome> ready = std::move(held_.begin()->second);
    held_.erase(held_.begin());
    ++next_;
    lock.unlock();
    for (Outcome& outcome : ready) answer_(std::move(outcome));
    lock.lock();
  }
  releasing_ = false;
}

}  // namespace espalier::runtime
