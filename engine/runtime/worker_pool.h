// worker_pool.h — a few threads that tasks wait for, first in, first out.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"

namespace espalier::runtime {

class WorkerPool {
 public:
  using Task = absl::AnyInvocable<void()>;

  // `name` is what the system shows of the threads, at most 15 characters.
  WorkerPool(int threads, const std::string& name);
  ~WorkerPool() { Stop(); }

  // Nothing happens after Stop.
  void Schedule(Task task);
  // Ahead of everything that waits: freeing a model must not queue behind loads.
  void ScheduleFirst(Task task);

  // From its next task on every thread works in the background (thread_priority.h), for good.
  void EnterBackground();

  // Waits for running tasks; those not begun are dropped. Not from a task.
  void Stop();

 private:
  void Loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool background_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace espalier::runtime
