#include "engine/runtime/worker_pool.h"

#include <pthread.h>

#include <utility>

#include "engine/runtime/thread_priority.h"

namespace espalier::runtime {

WorkerPool::WorkerPool(int threads, const std::string& name) {
  for (int i = 0; i < threads; ++i) {
    threads_.emplace_back([this] { Loop(); });
    pthread_setname_np(threads_.back().native_handle(), name.c_str());
  }
}

void WorkerPool::Stop() {
  std::deque<Task> dropped;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped.swap(tasks_);
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void WorkerPool::Schedule(Task task) {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  tasks_.push_back(std::move(task));
  changed_.notify_one();
}

void WorkerPool::ScheduleFirst(Task task) {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  tasks_.push_front(std::move(task));
  changed_.notify_one();
}

void WorkerPool::EnterBackground() {
  const std::lock_guard lock(mutex_);
  background_ = true;
}

void WorkerPool::Loop() {
  bool in_background = false;
  while (true) {
    Task task;
    bool lower = false;
    {
      std::unique_lock lock(mutex_);
      while (tasks_.empty() && !stopping_) changed_.wait(lock);
      if (stopping_) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
      lower = background_ && !in_background;
    }
    if (lower) {
      runtime::EnterBackground();
      in_background = true;
    }
    const BackgroundWork work;  // of a thread that is not in the background: nothing
    task();
  }
}

}  // namespace espalier::runtime
