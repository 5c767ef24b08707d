// images.h — images of an IDX file as a model's input: FP32 pixels, byte / 255, in the model's own
// shape.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "clients/cli/idx.h"
#include "clients/cpp/tensor.h"
#include "proto/inference/grpc_service.pb.h"

namespace espalier::cli {

using TensorMetadata = inference::ModelMetadataResponse::TensorMetadata;

// "input FP32 [-1, 784]", for messages.
std::string Describe(const TensorMetadata& metadata);

// Images [first, first + count), which must exist, named and shaped as `input` says: [count, …],
// an element per pixel. InvalidArgument when the input takes something else.
absl::StatusOr<client::Tensor> ImageTensor(const IdxFile& images, int64_t first, int64_t count,
                                           const TensorMetadata& input);

}  // namespace espalier::cli
