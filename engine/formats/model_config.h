// model_config.h — a model's config.pbtxt (Triton's ModelConfig,
// proto/inference/model_config.proto), read and completed.
//
// A missing file, or a missing field, is completed from the model itself: name, backend "espalier",
// inputs and outputs, max_batch_size (kDefaultMaxBatchSize when every input and output has a
// symbolic first dimension, else 0), one CPU instance. A field that contradicts the model (unknown
// input, other dtype or dims) is an error that names both.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "engine/formats/model_graph.h"
#include "proto/inference/model_config.pb.h"

namespace espalier::formats {

inline constexpr int kDefaultMaxBatchSize = 256;
inline constexpr int64_t kMaxConfigBytes = int64_t{1} << 20;

// Parses text format. `origin` names the file in messages. InvalidArgument with line and column for
// a syntax error or an unknown field.
absl::StatusOr<inference::ModelConfig> ParseModelConfig(const std::string& text,
                                                        const std::string& origin);

// Reads `<model_dir>/config.pbtxt`; NotFound when there is none (a normal case), InvalidArgument
// above kMaxConfigBytes.
absl::StatusOr<inference::ModelConfig> ReadModelConfig(const std::string& model_dir);

// Fills what is missing and checks what is there. `name` is the model's directory name.
absl::StatusOr<inference::ModelConfig> CompleteModelConfig(inference::ModelConfig config,
                                                           const std::string& name,
                                                           const ModelGraph& graph);

// Espalier's own settings, from config.parameters (string values): precision, weight_memory
// (smallest | balanced | fastest), deterministic, flush_subnormals. Unknown keys are left alone; a
// bad value is an error that lists the good.
}  // namespace espalier::formats
