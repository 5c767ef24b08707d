// weight_edit.h — what changes in one tensor of a model's file, as a prepared model is told.
#pragma once

#include <string>

#include "absl/types/span.h"
#include "engine/sparse/element_edit.h"

namespace espalier::planner {

struct TensorEdit {
  std::string tensor;  // initializer of the file
  // Positions and bits as the file has them (its dtype, its order), ascending.
  absl::Span<const sparse::ElementEdit> elements;
};

}  // namespace espalier::planner
