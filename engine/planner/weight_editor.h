// weight_editor.h — changed elements of a model's file, followed to where they serve: PreparedModel::BeginEdit.
//
//   initializer ──transposed──▶ weight ──ServedForm──▶ each resident copy: in place, else built anew
//              └──converted──▶ constant: in place
//
// In deterministic mode a weight whose non-zeros move is built anew as a load would build it, and only if a load would
// choose the layout and kernel that it has: answers are those of a fresh load, bit for bit. Otherwise zeros may stay
// stored, a weight keeps its layout, and non-zeros that come or go are counted: plan_drift.h.
//
// Memory   A piece of the edits at a time, 5 MB; or a weight that is built anew: dense.
#pragma once

#include <functional>
#include <set>
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

class WeightEditor final : public WeightEdits {
 public:
  // Everything outlives it. `constant_memory`: where Program::values[i] is, on the device. `rebind` is called when weights
  // were built anew, so that they have other views.
  WeightEditor(const graph::Program& program, PlannedModel& planned, const Device& device,
               const PrepareOptions& options, const formats::WeightSource& after,
               std::function<void*(int)> constant_memory, std::function<absl::Status()> rebind)
      : program_(program),
        planned_(planned),
        device_(device),
        options_(options),
        after_(after),
        constant_memory_(std::move(constant_memory)),
        rebind_(std::move(rebind)),
        patcher_(device.AsCudaOrNull()) {}

  // Errors as PreparedModel::BeginEdit, with the tensor's name; InvalidArgument for positions that do not ascend within
  // it.
  absl::Status Apply(const TensorEdit& piece) override;
  absl::Status Finish() override;

 private:
  using Edits = std::vector<sparse::ElementEdit>;

  absl::Status Begin(const std::string& tensor);
  absl::Status Validate(const TensorEdit& piece);
  absl::Status EditWeight(const TensorEdit& piece, const graph::Initializer::Use& use);
  absl::Status EditConstant(const TensorEdit& piece, int value);
  // Copies that have no room for all edits of the tensor.
  absl::Status RebuildUnfit();
  absl::Status RebuildUnfit(const graph::Initializer::Use& use);
  absl::Status CheckChoice(int weight, const Tensor& dense) const;

  const graph::Program& program_;
  PlannedModel& planned_;
  const Device& device_;
  const PrepareOptions& options_;
  const formats::WeightSource& after_;
  const std::function<void*(int)> constant_memory_;
  const std::function<absl::Status()> rebind_;
  MemoryPatcher patcher_;
  bool rebuilt_ = false;

  // The tensor that is edited.
  std::string tensor_;
  const graph::Initializer* initializer_ = nullptr;  // null: none so far
  int64_t elements_ = 0, last_ = -1;  // how many it has; the last position that was edited
  std::set<ResidentWeight*> unfit_;
};

}  // namespace espalier::planner
