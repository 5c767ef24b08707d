// worker.h — one thread of the load generator: its connections, and what it saw.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "clients/bench/load.h"
#include "clients/bench/transport.h"

namespace espalier::bench {

// When requests are due that belong to the measurement.
struct Window {
  int64_t begin_nanos = 0, end_nanos = 0;
};

class Worker final : public AnswerSink {
 public:
  // All outlive it. `sequence` is the run's next request id.
  Worker(const LoadOptions& options, const RequestSource& source, Window window,
         std::atomic<uint64_t>& sequence, std::vector<std::shared_ptr<grpc::Channel>> channels);
  ~Worker() override;

  void Start();
  // From any thread, in the closed loop only before Start.
  void Send(int64_t due_nanos);
  int64_t outstanding() const { return outstanding_.load(std::memory_order_acquire); }
  // Why a stream broke; OK while none did.
  absl::Status broken() const;

  // Nothing is sent any more. Waits until `deadline_nanos` for what is in flight, then gives it up.
  void Finish(int64_t deadline_nanos);
  // After Finish.
  void AddTo(LoadResult& result) const;

  void OnAnswer(const Request& request, const grpc::Status& status,
                const AnswerFacts& facts) override;
  void OnUnasked() override { ++seen_.ledger.unasked; }
  void OnStreamEnd(const grpc::Status& status, bool broken, uint64_t unanswered) override;

 private:
  void Run();

  const LoadOptions& options_;
  const Window window_;
  std::atomic<uint64_t>& sequence_;
  grpc::CompletionQueue queue_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::thread thread_;
  std::atomic<uint64_t> sent_{0};
  std::atomic<int64_t> outstanding_{0};
  std::atomic<int> streams_{0};  // that have not ended
  LoadResult seen_;              // the thread's own until it has ended

  mutable std::mutex mutex_;
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace espalier::bench
