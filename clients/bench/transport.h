// transport.h — how requests reach the server and answers come back: one transport per connection.
//
//   Worker ──Send──▶ Transport ══gRPC══▶ … ══▶ Worker::Run ──Proceed──▶ AnswerSink::OnAnswer
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "clients/bench/load.h"
#include "clients/bench/request_source.h"
#include "grpcpp/channel.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/support/status.h"

namespace espalier::bench {

struct Request {
  uint64_t sequence = 0;  // its id, unique in the run
  int64_t due_nanos = 0, sent_nanos = 0;
};

// What a tag in a completion queue points to.
class Event {
 public:
  virtual ~Event() = default;
  virtual void Proceed(bool ok) = 0;
};

class AnswerSink {
 public:
  virtual ~AnswerSink() = default;
  // Every request that was sent, once. `facts` are of the answer when the status is OK.
  virtual void OnAnswer(const Request& request, const grpc::Status& status,
                        const AnswerFacts& facts) = 0;
  // An answer that belongs to no request in flight.
  virtual void OnUnasked() = 0;
  // A stream is over: as asked by Close, or `broken`. `unanswered` requests went down with it.
  virtual void OnStreamEnd(const grpc::Status& status, bool broken, uint64_t unanswered) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  // From any thread.
  virtual void Send(const Request& request) = 0;
  // Half-closes a stream; with `cancel` its requests in flight are given up. Calls have deadlines.
  virtual void Close(bool cancel) = 0;
};

// All outlive the transport, and the queue's thread calls the sink.
struct TransportParts {
  std::shared_ptr<grpc::Channel> channel;
  grpc::CompletionQueue* queue;
  const RequestSource* source;
  AnswerSink* sink;
  double timeout_seconds;
};

std::unique_ptr<Transport> MakeUnaryTransport(TransportParts parts);
std::unique_ptr<Transport> MakeStreamTransport(TransportParts parts);

int64_t NowNanos();  // monotonic

}  // namespace espalier::bench
