// delta_encoder.h — compares two sets of weights and encodes what differs.
//
// Work     Segments are encoded and tensors digested on `threads` threads; records reach the sink in
//          order, from one thread at a time.
// Memory   Per thread two segments (at most 32 MiB) and their events; finished records that wait for
//          an earlier one.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/updates/manifest.h"
#include "engine/updates/segment_codec.h"
#include "engine/updates/tensor_info.h"

namespace espalier::updates {

struct WeightEncoderOptions {
  int threads = 1;
  EncodeOptions encode;
  // Called now and then, from one thread at a time: elements looked at, and in all.
  std::function<void(int64_t done, int64_t total)> progress;
};

struct EncodedWeights {
  std::vector<TensorDelta> tensors;  // those that differ
  int64_t base_nonzeros = 0, target_nonzeros = 0;
  Digest base{}, target{};
};

// `tensor` counts the tensors that differ, as EncodedWeights has them.
using RecordSink =
    std::function<absl::Status(size_t tensor, int64_t segment, absl::string_view record)>;

// Where in the new weights each tensor of the old ones is; −1: nowhere, it is left as it is.
using TensorMap = std::vector<int64_t>;

// InvalidArgument when a tensor and its counterpart differ in dtype or dims.
absl::StatusOr<EncodedWeights> EncodeWeights(const TensorReader& old_weights,
                                             const TensorReader& new_weights, const TensorMap& map,
                                             const RecordSink& sink,
                                             const WeightEncoderOptions& options);

}  // namespace espalier::updates
