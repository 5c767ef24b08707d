// input_files.h — files of the command line as tensors for the inputs of a model.
#pragma once

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "clients/cli/args.h"
#include "clients/cli/images.h"
#include "clients/cpp/tensor.h"

namespace espalier::cli {

using Tensors = google::protobuf::RepeatedPtrField<TensorMetadata>;

// The values of the repeated flag [NAME=]VALUE by tensor; the name may be left out when there is
// one tensor. WrongUsage for names that the model has not, and for repeated ones.
absl::StatusOr<std::map<std::string, std::string>> NamedValues(const Args& args,
                                                               absl::string_view flag,
                                                               const Tensors& tensors);

// At most `limit` items of a file: .npy, IDX images (as FP32, byte / 255), or else raw elements of
// the input's datatype in the shape that `shape` ("1,784") says, or the model. Errors name the file.
absl::StatusOr<client::Tensor> ReadInput(const std::string& path, const TensorMetadata& input,
                                         const std::string& shape, int64_t limit);

}  // namespace espalier::cli
