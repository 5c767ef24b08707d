// create_delta.h — two checkpoints into an .espd.
//
// Tensors are matched by name; those left over by equal contents, then by equal contents transposed
// (an exporter that renamed or turned them). ONNX files must have the same graph, and their weights
// are matched by their place in it, whatever they are called.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/updates/checkpoint.h"
#include "engine/updates/delta_encoder.h"
#include "engine/updates/delta_file.h"

namespace espalier::updates {

struct CreateOptions {
  std::string model;
  int64_t base_version = 0, target_version = 0, sequence = 0;
  int64_t created_seconds = 0, expires_seconds = 0;
  std::vector<PrivateKey> keys;
  WeightEncoderOptions weights;
};

// The delta appears at `out` complete, in place of what is there, or not at all.
// InvalidArgument, naming the difference, when the two are not the same model.
absl::StatusOr<Manifest> CreateDelta(const Checkpoint& before, const Checkpoint& after,
                                     const std::string& out, const CreateOptions& options);

// How the tensors of two checkpoints correspond, by the rules above.
struct TensorMatch {
  TensorMap to_new;             // for each old tensor its index in the new ones, or −1
  std::vector<int64_t> to_old;  // for each new tensor: as Checkpoint::Skeleton takes it
  bool schema_changes = false;
};
absl::StatusOr<TensorMatch> MatchCheckpoints(const Checkpoint& before, const Checkpoint& after);

}  // namespace espalier::updates
