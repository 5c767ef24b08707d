// infer_encoder.h — a ModelInferResponse as one piece of memory, laid out before its tensors exist.
//
// All sizes are known when a batch has run, so the message is allocated once and the outputs are
// copied straight to their places in it.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "engine/runtime/infer_request.h"
#include "engine/runtime/signature.h"

namespace espalier::service {

class InferResponse {
 public:
  // All arguments must outlive it. The model's name and the outputs' names come from `signature`.
  InferResponse(const runtime::Signature& signature, int64_t version, absl::string_view id,
                std::vector<runtime::OutputTensor>& outputs);

  size_t bytes() const { return bytes_; }

  // Writes everything but the elements to `to`, bytes() long, and sets `data` of every output to
  // the place of its elements.
  void Write(std::byte* to);

 private:
  size_t OutputBytes(const runtime::OutputTensor& output) const;

  const runtime::Signature& signature_;
  const std::string version_;
  const absl::string_view id_;
  std::vector<runtime::OutputTensor>& outputs_;
  size_t bytes_ = 0;
};

}  // namespace espalier::service
