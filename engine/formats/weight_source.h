// weight_source.h — weights that take the place of a model file's own: the graph is the file's, the
// elements are somebody else's (a later version that came as a delta).
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/formats/model_graph.h"

namespace espalier::formats {

// Thread-safe.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  // Whether it has the elements of this initializer; what it has not stays as the file has it.
  virtual bool Has(const std::string& initializer) const = 0;
  // All elements, row-major, in `tensor`'s dtype and shape, which are the file's. InvalidArgument when
  // the source has another dtype or shape.
  virtual absl::Status Read(const std::string& initializer, Tensor& tensor) const = 0;
  // Once a graph has what it wants: whether what was read is what the source promises.
  virtual absl::Status Verify() const { return absl::OkStatus(); }
};

// Overwrites the initializers of `graph` that `weights` has, and lets it verify them.
absl::Status ReplaceWeights(ModelGraph& graph, const WeightSource& weights);

}  // namespace espalier::formats
