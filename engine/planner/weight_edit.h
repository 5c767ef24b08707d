// weight_edit.h — what changes in a model's file, as a prepared model is told.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/sparse/element_edit.h"

namespace espalier::planner {

struct TensorEdit {
  std::string tensor;  // initializer of the file
  // Positions and bits as the file has them (its dtype, its order), ascending.
  absl::Span<const sparse::ElementEdit> elements;
};

// Edits that are on their way into a model: PreparedModel::BeginEdit. After an error, or without Finish, the model is not
// to be used.
class WeightEdits {
 public:
  virtual ~WeightEdits() = default;
  // All edits of one tensor after all of another's, those of one in as many pieces as one likes, ascending.
  virtual absl::Status Apply(const TensorEdit& piece) = 0;
  virtual absl::Status Finish() = 0;
};

}  // namespace espalier::planner
