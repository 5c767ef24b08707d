// push_delta.h — PushDelta: deltas that come in, in pieces, and go on after a cut.
//
//   OnReadDone ──▶ (worker) header: where to go on ──▶ offset written ──▶ next read
//                  (worker) chunk: appended, durable in a while      ──▶ next read
//                  (worker) client has closed its side: staged       ──▶ answer
//
// Limits   So many pushes at once, ResourceExhausted beyond. A client that sends less than
//          `window_bytes` in `window` is ended with DeadlineExceeded; what it sent is kept.
// One file  A second push of a file that still comes in takes over, at the byte where the first one
//          is, which ends with Aborted: a client whose connection broke comes back before this side
//          knows of the break.
// Threads  gRPC's threads only hand messages on; a worker parses, writes and stages.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/time/time.h"
#include "engine/runtime/update_manager.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "service/telemetry.h"
#include "service/update_access.h"

namespace espalier::service {

inline constexpr uint64_t kMaxChunkBytes = 1 << 20;

struct PushLimits {
  int at_once = 8;
  absl::Duration window = absl::Seconds(30);
  uint64_t window_bytes = 64 << 10;
};

class PushCalls {
 public:
  // All outlive it.
  PushCalls(runtime::UpdateManager& manager, Telemetry& telemetry, const AccessToken& token,
            PushLimits limits);
  // After every call has ended.
  ~PushCalls();

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Open(
      grpc::CallbackServerContext& context);
  // Ends those that are open, and new ones at once.
  void EndAll(const absl::Status& status);

 private:
  class Call;
  class Shared;
  const std::unique_ptr<Shared> shared_;
};

}  // namespace espalier::service
