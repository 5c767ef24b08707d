#include "engine/runtime/pending_requests.h"

#include <algorithm>

namespace espalier::runtime {
namespace {

// Levels that are kept, and shown, while nobody waits in them: numbers of levels come from requests and
// may have 64 bits.
constexpr uint64_t kKeptLevels = 16;

}  // namespace

void DeadlineHeap::Put(size_t at, InferRequest* request) {
  heap_[at] = request;
  request->heap_index_ = static_cast<int32_t>(at);
}

void DeadlineHeap::SiftUp(size_t at) {
  InferRequest* request = heap_[at];
  for (; at > 0; at = (at - 1) / 2) {
    InferRequest* parent = heap_[(at - 1) / 2];
    if (parent->event_nanos_ <= request->event_nanos_) break;
    Put(at, parent);
  }
  Put(at, request);
}

void DeadlineHeap::SiftDown(size_t at) {
  InferRequest* request = heap_[at];
  while (2 * at + 1 < heap_.size()) {
    size_t child = 2 * at + 1;
    if (child + 1 < heap_.size() && heap_[child + 1]->event_nanos_ < heap_[child]->event_nanos_)
      ++child;
    if (heap_[child]->event_nanos_ >= request->event_nanos_) break;
    Put(at, heap_[child]);
    at = child;
  }
  Put(at, request);
}

void DeadlineHeap::Add(InferRequest* request) {
  heap_.push_back(request);
  SiftUp(heap_.size() - 1);
}

void DeadlineHeap::Remove(InferRequest* request) {
  if (request->heap_index_ < 0) return;
  const size_t at = static_cast<size_t>(request->heap_index_);
  request->heap_index_ = -1;
  InferRequest* last = heap_.back();
  heap_.pop_back();
  if (last == request) return;
  Put(at, last);
  SiftUp(at);
  SiftDown(static_cast<size_t>(last->heap_index_));
}

PendingRequests::PendingRequests(const BatchingPolicy& policy) : policy_(policy) {
  if (policy.levels == 0) LevelOf(0);
  for (uint64_t number = 1; number <= std::min(policy.levels, kKeptLevels); ++number)
    LevelOf(number);
}

PendingRequests::Level& PendingRequests::LevelOf(uint64_t number) {
  const auto [place, is_new] = levels_.try_emplace(number);
  if (is_new) place->second.max_pending = policy_.policy_of(number).max_pending;
  return place->second;
}

bool PendingRequests::HasRoom(uint64_t number) const {
  const int64_t max_pending = policy_.policy_of(number).max_pending;
  if (max_pending == 0) {
    return policy_.max_pending_elsewhere == 0 ||
           requests_elsewhere_ < policy_.max_pending_elsewhere;
  }
  const auto level = levels_.find(number);
  return level == levels_.end() || level->second.requests < max_pending;
}

void PendingRequests::Link(Level& level, InferRequest* request) {
  const int list = request->delayed_ ? 1 : 0;
  request->previous_ = level.last[list];
  request->next_ = nullptr;
  (level.last[list] == nullptr ? level.first[list] : level.last[list]->next_) = request;
  level.last[list] = request;
}

void PendingRequests::Unlink(Level& level, InferRequest* request) {
  const int list = request->delayed_ ? 1 : 0;
  (request->previous_ == nullptr ? level.first[list] : request->previous_->next_) = request->next_;
  (request->next_ == nullptr ? level.last[list] : request->next_->previous_) = request->previous_;
}

void PendingRequests::Add(InferRequest* request) {
  Level& level = LevelOf(request->level_);
  request->queued_ = true;
  Link(level, request);
  ++level.requests;
  ++requests_;
  if (level.max_pending == 0) ++requests_elsewhere_;
  items_ += request->batch;
  request->event_nanos_ = std::min(request->deadline_nanos, request->queue_deadline_nanos);
  if (request->event_nanos_ != INT64_MAX) deadlines_.Add(request);
}

void PendingRequests::Remove(InferRequest* request) {
  const auto place = levels_.find(request->level_);
  Level& level = place->second;
  request->queued_ = false;
  Unlink(level, request);
  deadlines_.Remove(request);
  --requests_;
  if (level.max_pending == 0) --requests_elsewhere_;
  items_ -= request->batch;
  if (--level.requests == 0 && request->level_ > kKeptLevels) levels_.erase(place);
}

void PendingRequests::Delay(InferRequest* request) {
  Level& level = levels_.at(request->level_);
  Unlink(level, request);
  request->delayed_ = true;
  Link(level, request);
  deadlines_.Remove(request);
  request->event_nanos_ = request->deadline_nanos;
  if (request->event_nanos_ != INT64_MAX) deadlines_.Add(request);
}

int64_t PendingRequests::OldestArrival() const {
  int64_t oldest = INT64_MAX;
  for (const auto& [number, level] : levels_) {
    for (const InferRequest* first : level.first) {
      if (first != nullptr) oldest = std::min(oldest, first->arrival_nanos);
    }
  }
  return oldest;
}

}  // namespace espalier::runtime
