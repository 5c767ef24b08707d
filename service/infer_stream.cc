#include "service/infer_stream.h"

#include "service/infer_encoder.h"
#include "service/infer_task.h"
#include "service/status.h"

namespace espalier::service {

// One request of a stream. Held by the stream from read to written.
class StreamTask final : public InferTask {
 public:
  StreamTask(ServiceState& state, std::shared_ptr<InferStream> stream)
      : InferTask(state, Envelope::kStream), stream_(std::move(stream)) {
    deadline_nanos = stream_->deadline_nanos();
  }

  const grpc::ByteBuffer& answer() const { return answer_; }

  size_t slot = 0;  // where the stream keeps it

 private:
  void Deliver(absl::Status status) override {
    if (status.ok()) {
      answer_ = Response();
    } else {
      const grpc::Slice error(StreamError(id(), ToGrpc(status).error_message()));
      answer_ = grpc::ByteBuffer(&error, 1);
    }
    stream_->Answered(*this, status);
  }

  const std::shared_ptr<InferStream> stream_;
  grpc::ByteBuffer answer_;
};

namespace {

// Answers that wait for their turn to be written. A client that does not read them is not read either:
// otherwise sixteen such clients would hold all the requests that the server takes at once.
constexpr size_t kMaxUnwritten = 16;

bool WantsErrorsAsStatus(const grpc::CallbackServerContext& context) {
  const auto& headers = context.client_metadata();
  const auto found = headers.find("triton_grpc_error");
  return found != headers.end() && found->second == "true";
}

}  // namespace

InferStream::InferStream(ServiceState& state, grpc::CallbackServerContext& context)
    : state_(state),
      scope_(state.telemetry, context, Rpc::kModelStreamInfer),
      deadline_nanos_(scope_.deadline_nanos()),
      max_in_flight_(state.streams.max_requests_in_flight()),
      errors_end_it_(WantsErrorsAsStatus(context)) {}

InferStream* InferStream::Open(ServiceState& state, grpc::CallbackServerContext& context) {
  // The constructor is private.
  const std::shared_ptr<InferStream> stream(new InferStream(state, context));
  const absl::Status admitted = state.streams.Add(stream);
  if (admitted.ok()) {
    stream->Pump(std::unique_lock(stream->mutex_));
  } else {
    stream->End(admitted);
  }
  return stream.get();
}

bool InferStream::StartWriteNow() const { return !writing_ && !outbox_.empty(); }

bool InferStream::StartReadNow() const {
  return !reading_ && !ending_ && !finished_ && in_flight_.size() < max_in_flight_ &&
         outbox_.size() < kMaxUnwritten;
}

// A read may still be running: it ends with the stream.
bool InferStream::FinishNow() const {
  return ending_ && !finished_ && in_flight_.empty() && starting_ == 0;
}

void InferStream::Pump(std::unique_lock<std::mutex> lock) {
  for (;;) {
    if (StartWriteNow()) {
      writing_ = true;
      const grpc::ByteBuffer* answer = &outbox_.front()->answer();
      ++starting_;
      lock.unlock();
      StartWrite(answer);
    } else if (StartReadNow()) {
      reading_ = true;
      ++starting_;
      lock.unlock();
      StartRead(&read_);
    } else {
      break;
    }
    lock.lock();
    --starting_;
  }
  if (!FinishNow()) return;
  finished_ = true;
  const absl::Status end = end_;
  lock.unlock();
  Finish(scope_.End(end));
}

void InferStream::OnReadDone(bool ok) {
  std::unique_lock lock(mutex_);
  std::shared_ptr<StreamTask> task;
  if (!ok) {
    ending_ = true;
  } else if (!ending_) {
    task = std::make_shared<StreamTask>(state_, shared_from_this());
    task->slot = in_flight_.size();
    in_flight_.push_back(task);
    if (cancelled_) task->Cancel();
  }
  if (task != nullptr) {
    lock.unlock();
    // Before the next read, which would give another thread the next request.
    task->Begin(read_);
    lock.lock();
  }
  read_.Clear();
  reading_ = false;
  Pump(std::move(lock));
}

void InferStream::Answered(StreamTask& task, const absl::Status& status) {
  // The task may be gone, and its hold on the stream with it, before Pump returns.
  const std::shared_ptr<InferStream> self = shared_from_this();
  std::shared_ptr<StreamTask> unwritten;
  std::unique_lock lock(mutex_);
  if (status.ok() || !errors_end_it_) {
    outbox_.push_back(&task);
  } else {
    unwritten = ReleaseLocked(task);
    if (!ending_) end_ = status;
    ending_ = true;
  }
  Pump(std::move(lock));
}

std::shared_ptr<StreamTask> InferStream::ReleaseLocked(const StreamTask& task) {
  const size_t slot = task.slot;
  std::shared_ptr<StreamTask> released = std::move(in_flight_[slot]);
  if (slot + 1 != in_flight_.size()) {
    in_flight_[slot] = std::move(in_flight_.back());
    in_flight_[slot]->slot = slot;
  }
  in_flight_.pop_back();
  return released;
}

// With ok = false the client is gone; the answers that are left fail the same way.
void InferStream::OnWriteDone(bool) {
  std::unique_lock lock(mutex_);
  const std::shared_ptr<StreamTask> written = ReleaseLocked(*outbox_.front());
  outbox_.pop_front();
  writing_ = false;
  Pump(std::move(lock));
}

void InferStream::End(absl::Status status) {
  std::unique_lock lock(mutex_);
  if (!ending_) {
    ending_ = true;
    end_ = std::move(status);
  }
  Pump(std::move(lock));
}

void InferStream::OnCancel() {
  std::vector<std::shared_ptr<StreamTask>> tasks;
  {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    end_ = absl::CancelledError("the client cancelled the stream");
    tasks = in_flight_;
  }
  // Not under the mutex: whoever is cancelled may be answered right here.
  for (const auto& task : tasks) task->Cancel();
}

void InferStream::OnDone() { state_.streams.Remove(this); }

}  // namespace espalier::service
