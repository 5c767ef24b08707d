// onnx_model.h — the bytes of an ONNX file as a message, parsed within limits.
#pragma once

#include <onnx/onnx_pb.h>

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/formats/reader.h"

namespace espalier::formats {

// InvalidArgument for what is no such message, ResourceExhausted above a limit.
absl::StatusOr<std::unique_ptr<onnx::ModelProto>> ParseOnnxModel(absl::string_view bytes,
                                                                 const ReadLimits& limits);

}  // namespace espalier::formats
