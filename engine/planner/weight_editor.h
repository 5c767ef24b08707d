// weight_editor.h — changed elements of a model's file, followed to where they serve: PreparedModel::Edit.
//
//   initializer ──transposed──▶ weight ──ServedForm──▶ each resident copy: in place, else built anew
//              └──converted──▶ constant: in place
//
// In deterministic mode a weight whose non-zeros move is built anew as a load would build it, and only if a load would
// choose the layout and kernel that it has: answers are those of a fresh load, bit for bit. Otherwise zeros may stay
// stored, and a weight keeps its layout for good.
//
// Memory   A piece of the edits at a time, 5 MB, beside a weight that is built anew: dense.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/formats/weight_source.h"
#include "engine/graph/program.h"
#include "engine/planner/model_planner.h"
#include "engine/planner/patch_memory.h"
#include "engine/planner/prepared_model.h"
#include "engine/planner/weight_edit.h"

namespace espalier::planner {

class WeightEditor {
 public:
  // Everything outlives it. `constant_memory`: where Program::values[i] is, on the device.
  WeightEditor(const graph::Program& program, PlannedModel& planned, const Device& device,
               const PrepareOptions& options, const formats::WeightSource& after,
               std::function<void*(int)> constant_memory)
      : program_(program),
        planned_(planned),
        device_(device),
        options_(options),
        after_(after),
        constant_memory_(std::move(constant_memory)),
        patcher_(device.AsCudaOrNull()) {}

  // Errors as PreparedModel::Edit, with the tensor's name; InvalidArgument for positions that do not ascend within it.
  absl::Status Apply(const TensorEdit& edit);
  // Whether a weight was built anew, so that it has another view.
  bool rebuilt() const { return rebuilt_; }

 private:
  using Edits = std::vector<sparse::ElementEdit>;

  absl::Status Validate(const TensorEdit& edit, const graph::Initializer& initializer) const;
  absl::Status EditWeight(const TensorEdit& edit, const graph::Initializer& initializer,
                          const graph::Initializer::Use& use);
  absl::Status EditConstant(const TensorEdit& edit, const graph::Initializer& initializer,
                            int value);
  // The new weight, as it is multiplied.
  absl::StatusOr<std::shared_ptr<const Tensor>> ReadServed(const std::string& name,
                                                           const graph::Initializer& initializer,
                                                           bool transposed,
                                                           const ServedForm& form) const;
  absl::Status CheckChoice(int weight, const Tensor& dense) const;

  const graph::Program& program_;
  PlannedModel& planned_;
  const Device& device_;
  const PrepareOptions& options_;
  const formats::WeightSource& after_;
  const std::function<void*(int)> constant_memory_;
  MemoryPatcher patcher_;
  bool rebuilt_ = false;
};

}  // namespace espalier::planner
