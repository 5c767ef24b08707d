// infer_task.h — one ModelInferRequest from its message to its answer, whichever RPC brought it.
//
//   callback thread   Begin ──▶ decode ──▶ find version ──▶ Submit
//   instance's thread                          TakeOutputs ──▶ Answer
//
// Nothing here waits, but for a copy from or to a region on a GPU. The message's slices are held
// until the task is gone, because the runtime copies tensors straight from them; the response is one
// slice, into which the outputs are copied. Inputs in shared memory are read when the request begins,
// outputs are written there by the run.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/runtime/infer_request.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "service/classification.h"
#include "service/infer_decoder.h"
#include "service/infer_encoder.h"
#include "service/service_state.h"
#include "service/shared_memory.h"

namespace espalier::service {

// Whoever derives from it implements Deliver: the task is counted as in flight until it is gone.
class InferTask : public runtime::InferRequest {
 public:
  // Answers at once when the request is faulty, else hands it to the model.
  void Begin(const grpc::ByteBuffer& message);

  absl::Status PlaceOutputs() final;
  absl::Status TakeOutputs(absl::Span<const std::byte* const> from) final;
  void Answer(absl::Status status) final;

 protected:
  InferTask(ServiceState& state, Envelope envelope) : state_(state), envelope_(envelope) {}
  ~InferTask() override;

  // Sends the answer; with an error, perhaps when to try again. The task may be gone afterwards.
  virtual void Deliver(absl::Status status) = 0;

  // Of an answer that asks the client to come back later; 0: it does not.
  int64_t retry_after_millis() const { return retry_after_millis_; }

  // As the client sent it; empty until the message was read.
  const std::string& id() const { return id_; }
  // The message that answers a request that went well.
  grpc::ByteBuffer Response() const { return grpc::ByteBuffer(&response_slice_, 1); }

 private:
  // Where an output goes that is not simply part of the response.
  struct Target {
    int64_t classification = 0;
    SharedMemoryRange range;
    std::shared_ptr<const SharedMemoryRegion>
        region;  // of `range`; null: in the response, or given to the output
  };

  // Of a request that is traced.
  struct Trace {
    uint64_t id;
    int64_t version;
    int64_t queued_nanos;
  };

  absl::Status Admit(int64_t message_bytes);
  absl::Status Decode(const grpc::ByteBuffer& message, DecodedRequest* request);
  // Moves the decoded tensors into the runtime's request.
  absl::Status TakeInputs(DecodedRequest& request);
  absl::Status TakeTyped(const DecodedInput& input, bool has_raw, runtime::ByteSlices& data);
  absl::Status TakeShared(const DecodedInput& input, runtime::TensorRange& range) const;
  absl::Status TakeRequestedOutputs(DecodedRequest& request);
  absl::Status TakeTarget(const DecodedOutput& output);
  // What the response says of an output that is not simply part of it: where it lies in shared memory, or its `classes`, at
  // which `from` then points.
  absl::Status Redirect(const Target& target, const runtime::OutputTensor& output,
                        ResponseOutput& part, const std::byte*& from, Classes& classes) const;

  // An overload as the operator wants it answered.
  absl::Status AskToRetry(const absl::Status& overload);
  void RecordTrace(const absl::Status& status);

  ServiceState& state_;
  const Envelope envelope_;
  int64_t admitted_bytes_ = -1;      // -1: not admitted
  std::vector<grpc::Slice> slices_;  // of the message
  // Raw form of inputs that were not raw in the message.
  std::vector<std::string> typed_;
  std::vector<Target> targets_;  // of the requested outputs; empty: all are part of the response
  std::string model_name_;       // once it was found
  std::string id_;
  std::unique_ptr<Trace> trace_;  // null: not traced
  int64_t retry_after_millis_ = 0;
  grpc::Slice response_slice_;
};

}  // namespace espalier::service
