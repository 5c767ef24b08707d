#include "engine/formats/weight_source.h"

namespace espalier::formats {

absl::Status ReplaceWeights(ModelGraph& graph, const WeightSource& weights) {
  for (auto& [name, tensor] : graph.initializers) {
    if (!weights.Has(name)) continue;
    if (absl::Status status = weights.Read(name, tensor); !status.ok()) return status;
  }
  return weights.Verify();
}

}  // namespace espalier::formats
