// infer_stream.h — one ModelStreamInfer: many requests, for any models, on one stream.
//
//   OnReadDone ──▶ StreamTask.Begin ─ ─ ─▶ Answered ──▶ outbox ──▶ written, task gone
//        ▲                                                              │
//        └───────────── next read, while fewer than the limit ◀─────────┘
//
// Requests begin in the order in which they came, and are answered in the order in which the models
// finish them. A request that fails is answered in its message and the stream goes on, unless the
// client sent the header "triton_grpc_error: true", which asks for the error to end the stream.
// From read to written a request counts as in flight; with `max_stream_requests_in_flight` of them, or
// when many answers are unwritten, the stream is not read further, so that HTTP/2 holds the client back.
//
// Ends     when the client has no more requests and all are answered; when the server drains (then
//          UNAVAILABLE, after the answers to what was read); when the client cancels, which cancels
//          what waits.
// Threads  All state is under one mutex, which is never held while gRPC or the runtime is called.
//          Held by the registry until OnDone, and by its tasks.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "service/rpc_scope.h"
#include "service/service_state.h"

namespace espalier::service {

class StreamTask;

class InferStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                          public std::enable_shared_from_this<InferStream> {
 public:
  // Ends at once when the server drains or has too many streams.
  static InferStream* Open(ServiceState& state, grpc::CallbackServerContext& context);

  // Reads nothing more and ends with `status` once what was read is answered.
  void End(absl::Status status);

  // A task's answer; the message it leaves is in `task`.
  void Answered(StreamTask& task, const absl::Status& status);

  int64_t deadline_nanos() const { return deadline_nanos_; }

 private:
  InferStream(ServiceState& state, grpc::CallbackServerContext& context);
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  // Starts whatever can be started. Called with the mutex held, and gives it back.
  void Pump(std::unique_lock<std::mutex> lock) ABSL_NO_THREAD_SAFETY_ANALYSIS;
  // Forgets a task of in_flight_; whoever gets it destroys it without the mutex.
  std::shared_ptr<StreamTask> ReleaseLocked(const StreamTask& task)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool StartWriteNow() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool StartReadNow() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool FinishNow() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ServiceState& state_;
  RpcScope scope_;
  const int64_t deadline_nanos_;
  const size_t max_in_flight_;
  const bool errors_end_it_;
  grpc::ByteBuffer read_;  // belongs to the read that is running
  std::mutex mutex_;
  std::vector<std::shared_ptr<StreamTask>> in_flight_ ABSL_GUARDED_BY(mutex_);
  std::deque<StreamTask*> outbox_ ABSL_GUARDED_BY(mutex_);  // answered; in_flight_ owns them
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;            // until the request has begun
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;            // the front of the outbox
  int starting_ ABSL_GUARDED_BY(mutex_) = 0;                // reads and writes being handed to gRPC
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;             // no more reads
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;  // Finish was called, or is about to be
  absl::Status end_ ABSL_GUARDED_BY(mutex_);       // what the stream ends with
};

}  // namespace espalier::service
