#include "clients/bench/worker.h"

#include <chrono>

#include "absl/strings/str_cat.h"

namespace espalier::bench {
namespace {

constexpr std::chrono::milliseconds kPoll(1);

template <typename Condition>
void WaitUntil(int64_t deadline_nanos, Condition condition) {
  while (!condition() && NowNanos() < deadline_nanos) std::this_thread::sleep_for(kPoll);
}

}  // namespace

Worker::Worker(const LoadOptions& options, const RequestSource& source, Window window,
               std::atomic<uint64_t>& sequence,
               std::vector<std::shared_ptr<grpc::Channel>> channels)
    : options_(options), window_(window), sequence_(sequence) {
  for (std::shared_ptr<grpc::Channel>& channel : channels) {
    TransportParts parts{std::move(channel), &queue_, &source, this, options.timeout_seconds};
    transports_.push_back(options.streaming ? MakeStreamTransport(std::move(parts))
                                            : MakeUnaryTransport(std::move(parts)));
  }
  if (options.streaming) streams_ = static_cast<int>(transports_.size());
}

Worker::~Worker() { Finish(0); }

void Worker::Start() {
  thread_ = std::thread([this] { Run(); });
}

void Worker::Run() {
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) static_cast<Event*>(tag)->Proceed(ok);
}

void Worker::Send(int64_t due_nanos) {
  outstanding_.fetch_add(1, std::memory_order_relaxed);
  const uint64_t nth = sent_.fetch_add(1, std::memory_order_relaxed);
  const Request request{sequence_.fetch_add(1, std::memory_order_relaxed), due_nanos, NowNanos()};
  transports_[nth % transports_.size()]->Send(request);
}

void Worker::OnAnswer(const Request& request, const grpc::Status& status,
                      const AnswerFacts& facts) {
  const int64_t now = NowNanos();
  ++seen_.ledger.answered;
  if (status.ok() && !facts.has_id) ++seen_.ledger.without_id;
  if (request.due_nanos >= window_.begin_nanos && request.due_nanos < window_.end_nanos) {
    const int64_t latency = now - request.due_nanos;
    seen_.send_delay.Record(request.sent_nanos - request.due_nanos);
    if (status.ok()) {
      seen_.latency.Record(latency);
      seen_.since_sent.Record(now - request.sent_nanos);
    } else {
      seen_.failure.Record(latency);
      ErrorCount& error = seen_.errors[status.error_code()];
      if (error.count++ == 0) error.example = status.error_message();
    }
  }
  if (options_.rate == 0 && now < window_.end_nanos && broken().ok()) Send(now);
  outstanding_.fetch_sub(1, std::memory_order_release);
}

void Worker::OnStreamEnd(const grpc::Status& status, bool broken, uint64_t unanswered) {
  seen_.ledger.unanswered += unanswered;
  if (broken) {
    const std::lock_guard<std::mutex> lock(mutex_);
    broken_ = status.ok()
                  ? absl::UnavailableError("the server ended the stream before the last answer")
                  : absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                                 absl::StrCat("the stream broke: ", status.error_message()));
  }
  streams_.fetch_sub(1, std::memory_order_release);
}

absl::Status Worker::broken() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return broken_;
}

void Worker::Finish(int64_t deadline_nanos) {
  if (!thread_.joinable()) return;
  WaitUntil(deadline_nanos, [&] { return outstanding() <= 0 || !broken().ok(); });
  const bool give_up = outstanding() > 0;
  for (const auto& transport : transports_) transport->Close(give_up);
  // A stream that was closed or cancelled ends by itself: operations may follow until then, and
  // none may once the queue is shut down.
  WaitUntil(INT64_MAX, [&] { return streams_.load(std::memory_order_acquire) == 0; });
  queue_.Shutdown();
  thread_.join();
}

void Worker::AddTo(LoadResult& result) const {
  result.latency.Add(seen_.latency);
  result.since_sent.Add(seen_.since_sent);
  result.failure.Add(seen_.failure);
  result.send_delay.Add(seen_.send_delay);
  for (const auto& [code, error] : seen_.errors) {
    ErrorCount& total = result.errors[code];
    if (total.count == 0) total.example = error.example;
    total.count += error.count;
  }
  result.ledger.sent += sent_;
  result.ledger.answered += seen_.ledger.answered;
  result.ledger.unanswered += seen_.ledger.unanswered;
  result.ledger.unasked += seen_.ledger.unasked;
  result.ledger.without_id += seen_.ledger.without_id;
}

}  // namespace espalier::bench
