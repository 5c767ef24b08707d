// worker_pool.h — a few threads for work that blocks: loading models and freeing them.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"

namespace espalier::runtime {

class WorkerPool {
 public:
  using Task = absl::AnyInvocable<void()>;

  explicit WorkerPool(int threads);
  // Waits for running tasks; those not begun are dropped.
  ~WorkerPool();

  void Schedule(Task task);
  // Ahead of everything that waits: freeing a model must not queue behind loads.
  void ScheduleFirst(Task task);

 private:
  void Loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace espalier::runtime
