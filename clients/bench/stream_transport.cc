#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>

#include <deque>
#include <map>
#include <mutex>

#include "clients/bench/transport.h"

namespace espalier::bench {
namespace {

constexpr char kMethod[] = "/inference.GRPCInferenceService/ModelStreamInfer";

// One stream. gRPC takes one write and one read at a time; further requests wait in `waiting_`.
class StreamTransport final : public Transport {
 public:
  explicit StreamTransport(TransportParts parts) : parts_(std::move(parts)), stub_(parts_.channel) {
    stream_ = stub_.PrepareCall(&context_, kMethod, parts_.queue);
    stream_->StartCall(&started_);
  }

  void Send(const Request& request) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) return;  // broken, which the sink knows
    in_flight_.emplace(request.sequence, request);
    waiting_.push_back(request.sequence);
    WriteNext();
  }

  void Close(bool cancel) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) return;
    if (cancel) context_.TryCancel();
    if (!closing_ && can_write_ && waiting_.empty()) HalfClose();
    closing_ = true;
  }

 private:
  // A tag that calls a method of the transport.
  struct Step final : Event {
    using Method = void (StreamTransport::*)(bool ok);
    Step(StreamTransport& transport, Method method) : transport(transport), method(method) {}
    void Proceed(bool ok) override { (transport.*method)(ok); }
    StreamTransport& transport;
    const Method method;
  };

  // With the lock held.
  void WriteNext() {
    if (!can_write_ || waiting_.empty()) return;
    can_write_ = false;
    stream_->Write(parts_.source->Message(waiting_.front()), &written_);
    waiting_.pop_front();
  }
  void HalfClose() {
    can_write_ = false;
    stream_->WritesDone(&half_closed_);
  }

  void OnStarted(bool ok) {
    if (!ok) return stream_->Finish(&status_, &finished_);
    stream_->Read(&answer_, &read_);
    OnWritten(true);
  }

  void OnWritten(bool ok) {
    if (!ok) return;  // the read ends too, and says why
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) return;  // its queue may be shut down: no more operations
    can_write_ = true;
    WriteNext();
    if (closing_ && can_write_) HalfClose();
  }

  void OnHalfClosed(bool) {}

  void OnRead(bool ok) {
    if (!ok) return stream_->Finish(&status_, &finished_);
    const AnswerFacts facts = ReadAnswer(answer_, /*streamed=*/true);
    Request request;
    bool known = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      // Without an id it can only be taken for the oldest one's; the ledger counts it.
      const auto found = facts.has_id ? in_flight_.find(facts.id) : in_flight_.begin();
      known = found != in_flight_.end();
      if (known) request = found->second;
      if (known) in_flight_.erase(found);
    }
    if (known) {
      // An error travels as a text, without a code.
      parts_.sink->OnAnswer(request,
                            facts.error.empty()
                                ? grpc::Status::OK
                                : grpc::Status(grpc::StatusCode::UNKNOWN, facts.error),
                            facts);
    } else {
      parts_.sink->OnUnasked();
    }
    stream_->Read(&answer_, &read_);
  }

  void OnFinished(bool) {
    size_t unanswered = 0;
    bool broken = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      unanswered = in_flight_.size();
      broken = !closing_;
      ended_ = true;
    }
    parts_.sink->OnStreamEnd(status_, broken, unanswered);
  }

  const TransportParts parts_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  grpc::ByteBuffer answer_;
  grpc::Status status_;
  Step started_{*this, &StreamTransport::OnStarted}, written_{*this, &StreamTransport::OnWritten},
      read_{*this, &StreamTransport::OnRead}, half_closed_{*this, &StreamTransport::OnHalfClosed},
      finished_{*this, &StreamTransport::OnFinished};

  std::mutex mutex_;
  std::map<uint64_t, Request> in_flight_;
  std::deque<uint64_t> waiting_;
  bool can_write_ = false;
  bool closing_ = false, ended_ = false;
};

}  // namespace

std::unique_ptr<Transport> MakeStreamTransport(TransportParts parts) {
  return std::make_unique<StreamTransport>(std::move(parts));
}

}  // namespace espalier::bench
