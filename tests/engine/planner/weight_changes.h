// weight_changes.h — a model file before and after somebody trained on, as PreparedModel::Edit is told about it.
#pragma once

#include <deque>
#include <random>
#include <string>
#include <vector>

#include "engine/formats/weight_source.h"
#include "engine/planner/weight_edit.h"

namespace espalier::testing {

uint32_t BitsAt(const Tensor& tensor, int64_t i);
void SetBits(Tensor& tensor, int64_t i, uint32_t bits);

// The initializers of a graph as the new weights.
class GraphWeights final : public formats::WeightSource {
 public:
  explicit GraphWeights(const formats::ModelGraph& graph) : graph_(graph) {}
  bool Has(const std::string& name) const override { return graph_.initializers.contains(name); }
  absl::Status Read(const std::string& name, Tensor& tensor) const override;

 private:
  const formats::ModelGraph& graph_;
};

// Every element that differs, tensor by tensor.
class Changes {
 public:
  Changes(const formats::ModelGraph& before, const formats::ModelGraph& after);
  const std::vector<planner::TensorEdit>& edits() const { return edits_; }

 private:
  std::deque<std::vector<sparse::ElementEdit>> elements_;
  std::vector<planner::TensorEdit> edits_;
};

// What happens to a share of the elements.
enum class Change {
  kValue,  // non-zeros get other values
  kSign,   // zeros get the other sign
  kDrop,   // non-zeros become zeros of either sign
  kGrow,   // zeros become non-zeros
  kOdd,    // non-zeros become NaN with a payload, infinities, subnormals
};
void Apply(Change change, double share, Tensor& tensor, std::mt19937& random);

}  // namespace espalier::testing
