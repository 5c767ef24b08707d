// model_config.h — a model's config.pbtxt (Triton's ModelConfig,
// proto/inference/model_config.proto), read and completed.
//
// A missing file, or a missing field, is completed from the model itself. A field that contradicts
// the model (unknown input, other dtype or dims) is an error that names both. A field that Espalier
// does not honour is a warning when leaving it out changes no answer (performance hints), and
// Unimplemented when it would.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/formats/model_graph.h"
#include "proto/inference/model_config.pb.h"

namespace espalier::formats {

inline constexpr int kDefaultMaxBatchSize = 256;
inline constexpr int kMaxMaxBatchSize = 1 << 16;
inline constexpr int kMaxInstances = 256;  // of all groups together: each is a thread and an arena
inline constexpr int64_t kMaxConfigBytes = int64_t{1} << 20;
inline constexpr char kDefaultModelFilename[] = "model.onnx";

// Parses text format, strictly. `origin` names the file in messages. InvalidArgument with line and
// column for a syntax error, an unknown field or a field given twice; ResourceExhausted above
// kMaxConfigBytes.
absl::StatusOr<inference::ModelConfig> ParseModelConfig(const std::string& text,
                                                        const std::string& origin);

// Reads and parses `<model_dir>/config.pbtxt`, and checks it as CheckModelConfig does; NotFound
// when there is none (a normal case).
absl::StatusOr<inference::ModelConfig> ReadModelConfig(const std::string& model_dir);

// The same from JSON, as clients send it in a request: names of fields in either of protobuf's forms.
absl::StatusOr<inference::ModelConfig> ParseModelConfigJson(const std::string& json,
                                                            const std::string& origin);

// Bytes that are equal for equal configs, to compare and to digest.
std::string CanonicalBytes(const inference::ModelConfig& config);

// All that can be checked without the model: known backend, names of files that stay in their
// folder, counts in range, nothing asked for that Espalier cannot do. Appends to `warnings`, unless
// null, one sentence for each setting that has no effect.
absl::Status CheckModelConfig(const inference::ModelConfig& config,
                              std::vector<std::string>* warnings = nullptr);

// Checks `config`, alone and against the model, and fills what is missing:
//
//   name                    `name`, the model's directory; another name is an error
//   backend, platform       "espalier"; the names of ONNX Runtime's are accepted and replaced, others refused
//   max_batch_size          kDefaultMaxBatchSize when every input and output has a symbolic first dimension, 0 when
//                           none has, Unimplemented else; text format cannot tell 0 from missing
//   input, output           in the order of the model, all of them; dims without the batch dimension when
//                           max_batch_size > 0
//   version_policy          the latest one
//   instance_group          one on the CPU; a group without a count has one instance
//   default_model_filename  kDefaultModelFilename
absl::StatusOr<inference::ModelConfig> CompleteModelConfig(
    inference::ModelConfig config, const std::string& name, const ModelGraph& graph,
    std::vector<std::string>* warnings = nullptr);

// TYPE_FP32 for kFloat32, …; TYPE_STRING for kBytes.
inference::DataType ConfigDataType(DType dtype);

}  // namespace espalier::formats
