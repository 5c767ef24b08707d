// served_form.h — what becomes of an element of the file on its way to a kernel: another type, a
// subnormal flushed. Element by element, so that a change of the file is a change of what serves.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/formats/weight_source.h"
#include "engine/graph/program.h"
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

// What `weights` has for the initializer `name`, as it is multiplied where it is used so. FailedPrecondition when it has
// nothing, else errors as WeightSource::Read.
absl::StatusOr<std::shared_ptr<const Tensor>> ReadServed(const formats::WeightSource& weights,
                                                         const std::string& name,
                                                         const graph::Initializer& initializer,
                                                         bool transposed, const ServedForm& form);

}  // namespace espalier::planner
