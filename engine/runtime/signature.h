// signature.h — what a model takes and gives, and whether a request fits.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/formats/model_graph.h"
#include "engine/runtime/infer_request.h"

namespace espalier::runtime {

struct TensorSpec {
  std::string name;
  DType dtype = DType::kFloat32;
  Shape shape;            // first dimension kBatch when the model batches
  size_t item_bytes = 0;  // of one item; of the whole tensor when the model does not batch
};

struct Signature {
  std::string model;
  int64_t max_batch_size = 0;  // 0: the model does not batch
  std::vector<TensorSpec> inputs, outputs;

  // InvalidArgument when an input or output contradicts `max_batch_size` (a batching model has
  // kBatch as first dimension everywhere, another one nowhere) has no fixed size per item, or when
  // `max_batch_size` is outside [0, kMaxBatchSizeLimit].
  static absl::StatusOr<Signature> Create(std::string model, int64_t max_batch_size,
                                          const std::vector<formats::ValueInfo>& inputs,
                                          const std::vector<formats::ValueInfo>& outputs);
};

// Checks names, types, shapes, batch and sizes of the request's inputs and the outputs it asks for,
// and fills batch, input_of and outputs. InvalidArgument names the tensor, expected and got.
absl::Status BindRequest(const Signature& signature, InferRequest& request);

}  // namespace espalier::runtime
