// model_settings.h — Espalier's own settings of a model, from the parameters of its config.pbtxt:
//
//   parameters { key: "weight_memory" value { string_value: "smallest" } }
//
//   precision         as_stored (default), fp32, bf16       type of weights and activations; sums are fp32
//   weight_memory     smallest, balanced (default), fastest  may a layer keep a second layout for large batches?
//   deterministic     true, false (default)                  bit-identical answers whatever batch and replica
//   flush_subnormals  true, false (default)                  weights below the smallest normal number are zeros
//   allowed_batch_sizes  any (default), preferred            preferred: only batches of a preferred_batch_size are
//                                                            executed, filled up with zeros; larger requests are
//                                                            refused
//   threads           1 to the number of CPUs                every instance on the CPU computes with that many threads of
//                                                            its own; left out: all share those of --threads
//   execute_delay_ms  0 (default) to 600000                  every execution takes that much longer: for tests of
//                                                            clients and of queues, under the name that Triton's
//                                                            test backends gave it; warned about at load
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/formats/precision.h"
#include "engine/formats/weight_memory.h"
#include "proto/inference/model_config.pb.h"

namespace espalier::formats {

inline constexpr int64_t kMaxExecuteDelayMillis = 600'000;

struct ModelSettings {
  Precision precision = Precision::kAsStored;
  WeightMemory weight_memory = WeightMemory::kBalanced;
  bool deterministic = false;
  bool flush_subnormals = false;
  bool pads_to_preferred = false;
  int threads = 0;  // of an instance; 0: shared
  int64_t execute_delay_millis = 0;
};

// A parameter of another name has no effect: unless null, `warnings` gets a sentence for each.
// InvalidArgument for a value that is none of the above lists them.
absl::StatusOr<ModelSettings> ReadModelSettings(const inference::ModelConfig& config,
                                                std::vector<std::string>* warnings = nullptr);

}  // namespace espalier::formats
