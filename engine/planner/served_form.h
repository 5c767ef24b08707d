// served_form.h — what becomes of an element of the file on its way to a kernel: another type, a
// subnormal flushed. Element by element, so that a change of the file is a change of what serves.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/sparse/element_edit.h"
#include "engine/tensor/tensor.h"

namespace espalier::planner {

struct ServedForm {
  DType file = DType::kFloat32, served = DType::kFloat32;
  bool flush_subnormals = false;  // those of the served type

  // A whole tensor of the file; the same one when nothing becomes of it.
  absl::StatusOr<std::shared_ptr<const Tensor>> Apply(std::shared_ptr<const Tensor> tensor) const;
  // The bits of edits: those of the file become those that serve.
  void Apply(absl::Span<sparse::ElementEdit> edits) const;
};

}  // namespace espalier::planner
