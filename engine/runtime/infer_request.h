// infer_request.h — one inference request on its way through the runtime.
//
//   front end fills it ──ServedVersion::Submit──▶ checked, queued ──▶ executed ──▶ Answer
//
// Memory   The request borrows the bytes of its inputs (a received message, in whatever pieces and
//          alignment it came); it must stay alive, and the bytes in place, until Answer was called.
//          Inputs are copied once, into the aligned buffer of the instance that runs them; outputs
//          once, from there to wherever TakeOutputs wants them. What lies in a TensorMemory is copied when it
//          runs, by the GPU itself where the memory has an address for it.
// Threads  Cancel may be called at any time from any thread. Everything else belongs to one thread
//          at a time: the front end's until Submit, the runtime's from then on.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/runtime/statistics.h"
#include "engine/runtime/tensor_memory.h"
#include "engine/tensor/shape.h"

namespace espalier::runtime {

class Batcher;
class ServedVersion;

// Bytes that somebody else owns.
struct ByteSlice {
  const std::byte* data = nullptr;
  size_t size = 0;
};

// A 3 KB tensor arrives in one slice or two; a 1 MiB tensor in 17 to 129.
using ByteSlices = absl::InlinedVector<ByteSlice, 2>;

size_t TotalBytes(const ByteSlices& slices);

// An input as the client named and described it. Little-endian elements, row-major.
struct InputTensor {
  std::string name;
  std::string datatype;  // "FP32", …
  Shape shape;           // with the batch dimension
  ByteSlices data;
  TensorRange range;  // where the data are instead, if it has memory

  size_t bytes() const { return range.memory != nullptr ? range.bytes : TotalBytes(data); }
};

// An output that the request asked for.
struct OutputTensor {
  int index = 0;  // of the model's outputs
  Shape shape;    // with the batch dimension
  size_t bytes = 0;
  TensorRange range;      // where it is wanted, if it has memory
  bool in_place = false;  // the run brings it there
};

class InferRequest {
 public:
  virtual ~InferRequest() = default;

  // --- filled by the front end ---
  std::vector<InputTensor> inputs;
  std::vector<std::string> requested_outputs;  // empty: all, in the model's order
  int64_t arrival_nanos = NowNanos();
  int64_t deadline_nanos = INT64_MAX;  // on the clock of NowNanos; the client stops waiting then
  // In the queue, if the model allows requests to choose it; 0: the model's default.
  int64_t timeout_micros = 0;
  // 1 is the highest; 0, or a level that the model has not: the model's default.
  uint64_t priority = 0;

  bool counted = true;  // in the version's statistics; false: a warm-up

  // Answered CANCELLED without being executed, unless its execution has already begun. A request
  // that waits is answered in this call.
  void Cancel();
  bool cancelled() const { return (state_.load(std::memory_order_relaxed) & kCancelled) != 0; }

  // --- filled by Submit ---
  std::shared_ptr<const ServedVersion> version;  // the pin; released just before Answer
  int64_t batch = 1;                             // items; 1 for a model that does not batch
  std::vector<int> input_of;                     // model input i is inputs[input_of[i]]
  std::vector<OutputTensor> outputs;             // in the order asked for
  int64_t queue_deadline_nanos = INT64_MAX;      // when its queue's timeout action applies

  // --- filled before Answer ---
  bool executed = false;
  PhaseNanos phases{};  // of a request that was executed

  // Called when `outputs` is known, before anything is queued or run: says where they are wanted, if not by TakeOutputs. An
  // error is the request's answer.
  virtual absl::Status PlaceOutputs() { return absl::OkStatus(); }

  // Copies the results out of the instance's memory, which the next batch overwrites: outputs[i] is
  // at from[i], or in its range if it has one. Called once, after a run that went well; an error is the request's answer.
  virtual absl::Status TakeOutputs(absl::Span<const std::byte* const> from) = 0;

  // The answer; called exactly once. The request may delete itself here: nobody touches it
  // afterwards.
  virtual void Answer(absl::Status status) = 0;

 private:
  friend class Batcher;
  friend class PendingRequests;
  friend class DeadlineHeap;

  // Whose the request is: while it waits, of whoever claims it first. One atomic says that and
  // whether it is cancelled, so that exactly one of an instance, the timer and a canceller gets it.
  //
  //   kFree ──Offer──▶ kWaiting ──Claim──▶ kClaimed
  //                        └──Cancel──▶ kWaiting | kCancelled: the canceller's
  static constexpr uint8_t kFree = 0, kWaiting = 1, kClaimed = 2, kCancelled = 4;

  // From now on others may claim it. False if it is cancelled already: it stays the caller's.
  bool Offer(Batcher* batcher) {
    batcher_ = batcher;
    uint8_t expected = kFree;
    return state_.compare_exchange_strong(expected, kWaiting, std::memory_order_acq_rel);
  }
  // True: it is the caller's. False: somebody else's.
  bool Claim() {
    uint8_t expected = kWaiting;
    return state_.compare_exchange_strong(expected, kClaimed, std::memory_order_acq_rel);
  }

  std::atomic<uint8_t> state_{kFree};
  Batcher* batcher_ = nullptr;

  // Of the queue that it waits in, under that queue's lock.
  InferRequest* previous_ = nullptr;
  InferRequest* next_ = nullptr;
  uint64_t level_ = 0;
  bool queued_ = false;
  bool delayed_ = false;             // behind those that have not expired
  int32_t heap_index_ = -1;          // -1: nothing expires
  int64_t event_nanos_ = INT64_MAX;  // the first of its deadlines
};

// A name sent by a client, fit for messages and logs: escaped where not printable, cut at 128
// bytes.
std::string Printable(absl::string_view name);

}  // namespace espalier::runtime
