// pending_requests.h — the requests that wait for one model version, in the order in which they will be
// served, and the moments at which they expire. No lock of its own.
//
//   level 1:  not expired, oldest first │ expired and delayed, oldest first
//   level 2:  …
//
// Intrusive: nothing is allocated per request. Adding and removing take O(1), and O(log n) more for a
// request that can expire.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "engine/runtime/batching_policy.h"
#include "engine/runtime/infer_request.h"

namespace espalier::runtime {

// The waiting requests that can expire, the first on top: a binary heap in which every request knows its
// place.
class DeadlineHeap {
 public:
  bool empty() const { return heap_.empty(); }
  InferRequest* top() const { return heap_.front(); }
  int64_t first_nanos() const { return heap_.empty() ? INT64_MAX : heap_.front()->event_nanos_; }
  void Add(InferRequest* request);
  // Nothing happens to one that is not in the heap.
  void Remove(InferRequest* request);

 private:
  void Put(size_t at, InferRequest* request);
  void SiftUp(size_t at);
  void SiftDown(size_t at);

  std::vector<InferRequest*> heap_;
};

class PendingRequests {
 public:
  struct Level {
    int64_t max_pending = 0;      // of its policy
    InferRequest* first[2] = {};  // [0] not expired, [1] delayed
    InferRequest* last[2] = {};
    int64_t requests = 0;
  };

  explicit PendingRequests(const BatchingPolicy& policy);

  int64_t requests() const { return requests_; }
  int64_t items() const { return items_; }
  // Ascending: 1 is the highest. A level that nobody waits in may be missing.
  const std::map<uint64_t, Level>& levels() const { return levels_; }
  // Whether one more may wait in the level.
  bool HasRoom(uint64_t level) const;

  // At the end of the level `request->level_`.
  void Add(InferRequest* request);
  void Remove(InferRequest* request);
  // Behind the others of its level; from now on only its deadline can end its waiting.
  void Delay(InferRequest* request);

  // The arrival of the oldest; INT64_MAX if there is none.
  int64_t OldestArrival() const;
  DeadlineHeap& deadlines() { return deadlines_; }

  // Calls `visit(request)` in serving order until it says false. `visit` may remove the request.
  template <typename Visit>
  void ForEach(Visit visit) {
    for (auto level = levels_.begin(); level != levels_.end();) {
      auto& [number, lists] = *level++;  // the level may go with its last request
      InferRequest* delayed = lists.first[1];
      InferRequest* request = lists.first[0] != nullptr ? lists.first[0] : delayed;
      while (request != nullptr) {
        InferRequest* next = request->next_;
        if (next == nullptr && !request->delayed_) next = delayed;
        if (!visit(request)) return;
        request = next;
      }
    }
  }

 private:
  void Link(Level& level, InferRequest* request);
  void Unlink(Level& level, InferRequest* request);

  // Makes the level if it is new.
  Level& LevelOf(uint64_t number);

  const BatchingPolicy& policy_;
  std::map<uint64_t, Level> levels_;
  DeadlineHeap deadlines_;
  int64_t requests_ = 0;
  int64_t items_ = 0;
  int64_t requests_elsewhere_ = 0;  // in levels without a limit of their own
};

}  // namespace espalier::runtime
