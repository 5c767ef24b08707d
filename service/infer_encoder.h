// infer_encoder.h — a ModelInferResponse, bare or in a ModelStreamInferResponse, as one piece of
// memory, laid out before its tensors are in it.
//
// All sizes are known when a batch has run, so the message is allocated once and the outputs are
// copied straight to their places in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "service/infer_decoder.h"

namespace espalier::service {

enum class Envelope : uint8_t {
  kUnary,   // the answer of ModelInfer
  kStream,  // one of ModelStreamInfer: with "triton_final_response", always true, since every
            // request has exactly one answer
};

// An output of a response. `data` is where its `bytes` bytes go, set by Write.
struct ResponseOutput {
  absl::string_view name;
  absl::string_view datatype;
  absl::Span<const int64_t> shape;
  size_t bytes = 0;
  const SharedMemoryRange* shared_memory = nullptr;  // where it lies instead; then `bytes` is 0
  std::byte* data = nullptr;
};

class InferResponse {
 public:
  // All that is pointed to must outlive it.
  InferResponse(absl::string_view model, int64_t version, absl::string_view id,
                absl::Span<ResponseOutput> outputs, Envelope envelope);

  size_t bytes() const { return bytes_; }

  // Writes everything but the elements to `to`, bytes() long, and sets `data` of every output to
  // the place of its elements.
  void Write(std::byte* to);

 private:
  const absl::string_view model_;
  const std::string version_;
  const absl::string_view id_;
  const absl::Span<ResponseOutput> outputs_;
  const Envelope envelope_;
  size_t response_bytes_ = 0;  // of the ModelInferResponse
  size_t bytes_ = 0;
};

// The ModelStreamInferResponse for a request that failed; `id` tells the client which.
std::string StreamError(absl::string_view id, absl::string_view message);

}  // namespace espalier::service
