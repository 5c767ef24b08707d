// infer_task.h — one ModelInferRequest from its message to its answer, whichever RPC brought it.
//
//   callback thread   Begin ──▶ decode ──▶ find version ──▶ Submit
//   instance's thread                          TakeOutputs ──▶ Answer
//
// Nothing here waits. The message's slices are held until the task is gone, because the runtime
// copies tensors straight from them; the response is one slice, into which the outputs are copied.
// Inputs in shared memory are read when the request begins, outputs are written there by the run.
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

// Whoever derives from it implements Answer: the task is counted as in flight until it is gone.
class InferTask : public runtime::InferRequest {
 public:
  // Answers at once when the request is faulty, else hands it to the model.
  void Begin(const grpc::ByteBuffer& message);

  absl::Status TakeOutputs(absl::Span<const std::byte* const> from) override;

 protected:
  InferTask(ServiceState& state, Envelope envelope) : state_(state), envelope_(envelope) {}
  ~InferTask() override;

  // As the client sent it; empty until the message was read.
  const std::string& id() const { return id_; }
  // The message that answers a request that went well.
  grpc::ByteBuffer Response() const { return grpc::ByteBuffer(&response_slice_, 1); }

 private:
  // Where an output goes that is not simply part of the response.
  struct Target {
    int64_t classification = 0;
    SharedMemoryRange range;
    std::shared_ptr<const SharedMemoryRegion> region;  // of `range`; null: in the response
  };

  absl::Status Admit(int64_t message_bytes);
  absl::Status Decode(const grpc::ByteBuffer& message, DecodedRequest* request);
  // Moves the decoded tensors into the runtime's request.
  absl::Status TakeInputs(DecodedRequest& request);
  absl::StatusOr<runtime::ByteSlices> TypedData(const DecodedInput& input, bool has_raw);
  absl::StatusOr<runtime::ByteSlices> SharedData(const DecodedInput& input);
  // Room for an input of `bytes` bytes that is not in the message.
  absl::StatusOr<std::byte*> AllocateInput(size_t bytes);
  absl::Status TakeRequestedOutputs(const DecodedRequest& request);
  absl::Status TakeTarget(const DecodedOutput& output);
  // Takes an output to its target: to shared memory, or as classes into `classes`. `part` is then
  // what the response says of it, and `from` where its bytes in the response come from.
  absl::Status Redirect(const Target& target, const runtime::OutputTensor& output,
                        ResponseOutput& part, const std::byte*& from, Classes& classes) const;

  ServiceState& state_;
  const Envelope envelope_;
  int64_t admitted_bytes_ = -1;      // -1: not admitted
  std::vector<grpc::Slice> slices_;  // of the message
  // Raw form of inputs that were not raw in the message.
  std::vector<std::string> typed_;
  std::vector<std::unique_ptr<std::byte[]>> copied_;
  std::vector<Target> targets_;  // of the requested outputs; empty: all are part of the response
  std::string id_;
  grpc::Slice response_slice_;
};

}  // namespace espalier::service
