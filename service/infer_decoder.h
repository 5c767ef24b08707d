// infer_decoder.h — a ModelInferRequest out of the slices in which it was received.
//
// Small fields are copied, tensors are not: raw_input_contents and typed contents stay ranges of
// the slices. The semantics are protobuf's (unknown fields are skipped, the last of a repeated
// scalar wins, embedded messages merge, strings are UTF-8); on top come caps on counts, since a
// two-byte field costs a hundred bytes once decoded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/runtime/infer_request.h"

namespace espalier::service {

inline constexpr size_t kMaxTensors = 1024;  // inputs, outputs and raw entries, each
inline constexpr size_t kMaxRank = 32;

// Where in which registered region of shared memory a tensor lies.
struct SharedMemoryRange {
  std::string region;  // empty: the tensor is in the message
  int64_t offset = 0;
  int64_t byte_size = -1;
};

struct DecodedInput {
  std::string name;
  std::string datatype;
  Shape shape;
  bool has_contents = false;     // InferTensorContents was present
  runtime::ByteSlices contents;  // its bytes, see typed_contents.h
  SharedMemoryRange shared_memory;
};

struct DecodedOutput {
  std::string name;
  int64_t classification = 0;  // the k best classes instead of the tensor; 0: the tensor
  SharedMemoryRange shared_memory;
};

struct DecodedRequest {
  std::string model_name;
  std::string model_version;
  std::string id;
  int64_t timeout_micros = 0;  // parameter "timeout"; 0: none
  uint64_t priority = 0;       // parameter "priority"; 0: the model's default
  // What is wrong with a parameter that means something, of the request or a tensor; empty: nothing.
  std::string parameter_error;
  std::vector<DecodedInput> inputs;
  std::vector<DecodedOutput> outputs;
  std::vector<runtime::ByteSlices> raw_inputs;
};

// InvalidArgument for a malformed message or one above the caps. `slices` must outlive `request`.
absl::Status DecodeInferRequest(absl::Span<const runtime::ByteSlice> slices,
                                DecodedRequest* request);

}  // namespace espalier::service
