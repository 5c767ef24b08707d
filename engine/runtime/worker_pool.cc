#include "engine/runtime/worker_pool.h"

#include <pthread.h>

#include <utility>

namespace espalier::runtime {

WorkerPool::WorkerPool(int threads) {
  for (int i = 0; i < threads; ++i) {
    threads_.emplace_back([this] { Loop(); });
    pthread_setname_np(threads_.back().native_handle(), "loader");
  }
}

WorkerPool::~WorkerPool() {
  std::deque<Task> dropped;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped.swap(tasks_);
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::Schedule(Task task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  changed_.notify_one();
}

void WorkerPool::ScheduleFirst(Task task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_front(std::move(task));
  changed_.notify_one();
}

void WorkerPool::Loop() {
  while (true) {
    Task task;
    {
      std::unique_lock lock(mutex_);
      while (tasks_.empty() && !stopping_) changed_.wait(lock);
      if (stopping_) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace espalier::runtime
