#include "engine/planner/weight_editor.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/graph/ops/linear.h"
#include "engine/graph/ops/transpose.h"
#include "engine/planner/choose.h"
#include "engine/planner/cost_table.h"
#include "engine/sparse/structure.h"

namespace espalier::planner {
namespace {

using sparse::ElementEdit;

// Edits that are on their way at a time: they take some 80 bytes each, and finding their places takes steps over the
// weight's rows.
constexpr size_t kPieceEdits = 64 << 10;

// Edits of a matrix [rows, cols], of its transpose: again ascending, by a counting sort over columns.
std::vector<ElementEdit> Transposed(absl::Span<const ElementEdit> edits, int64_t rows,
                                    int64_t cols) {
  std::vector<int64_t> next(cols + 1, 0);
  for (const ElementEdit& edit : edits) ++next[edit.position % cols + 1];
  for (int64_t c = 0; c < cols; ++c) next[c + 1] += next[c];
  std::vector<ElementEdit> turned(edits.size());
  for (const ElementEdit& edit : edits) {
    const int64_t row = edit.position / cols, col = edit.position % cols;
    turned[next[col]++] = {col * rows + row, edit.old_bits, edit.new_bits};
  }
  return turned;
}

// What is there once the edits are done, as edits that change nothing.
std::vector<ElementEdit> AsDone(std::vector<ElementEdit> edits) {
  for (ElementEdit& edit : edits) edit.old_bits = edit.new_bits;
  return edits;
}

absl::Status In(const std::string& tensor, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("tensor '", tensor, "': ", status.message()));
}

}  // namespace

absl::Status WeightEditor::Apply(const TensorEdit& edit) {
  const auto it = program_.initializers.find(edit.tensor);
  if (it == program_.initializers.end() || it->second.derived ||
      (it->second.weights.empty() && it->second.values.empty())) {
    return absl::UnimplementedError(
        absl::StrCat("tensor '", edit.tensor,
                     "' did not go into the model element by element; prepare it anew"));
  }
  const graph::Initializer& initializer = it->second;
  absl::Status status = Validate(edit, initializer);
  for (const auto& use : initializer.weights) {
    if (status.ok()) status = EditWeight(edit, initializer, use);
  }
  for (const auto& use : initializer.values) {
    if (status.ok()) status = EditConstant(edit, initializer, use.index);
  }
  return In(edit.tensor, status);
}

absl::Status WeightEditor::Validate(const TensorEdit& edit,
                                    const graph::Initializer& initializer) const {
  auto elements = ElementCount(initializer.shape);
  if (!elements.ok()) return elements.status();
  int64_t last = -1;
  for (const ElementEdit& element : edit.elements) {
    if (element.position <= last || element.position >= *elements) {
      return absl::InvalidArgumentError(absl::StrCat("position ", element.position, " after ", last,
                                                     ", of ", *elements,
                                                     " elements: positions must ascend"));
    }
    last = element.position;
  }
  return absl::OkStatus();
}

absl::Status WeightEditor::EditWeight(const TensorEdit& edit, const graph::Initializer& initializer,
                                      const graph::Initializer::Use& use) {
  PlannedWeight& weight = planned_.weights[use.index];
  const auto zeros =
      options_.deterministic ? ResidentWeight::Zeros::kAsEncoded : ResidentWeight::Zeros::kMayStay;
  std::vector<bool> fits(weight.copies.size(), true);
  const auto served = [&](absl::Span<const ElementEdit> piece) {
    Edits edits = use.transposed ? Transposed(piece, initializer.shape[0], initializer.shape[1])
                                 : Edits(piece.begin(), piece.end());
    weight.form.Apply(absl::MakeSpan(edits));
    return edits;
  };
  for (size_t first = 0; first < edit.elements.size(); first += kPieceEdits) {
    const Edits edits = served(edit.elements.subspan(first, kPieceEdits));
    for (size_t i = 0; i < weight.copies.size(); ++i) {
      const auto fit = weight.copies[i]->EditInPlace(edits, zeros, patcher_);
      if (!fit.ok()) return fit.status();
      fits[i] = fits[i] && *fit;
    }
  }
  std::shared_ptr<const Tensor> dense;
  for (size_t i = 0; i < weight.copies.size(); ++i) {
    if (fits[i]) continue;
    ResidentWeight& copy = *weight.copies[i];
    if (dense == nullptr) {
      auto read = ReadServed(edit.tensor, initializer, use.transposed, weight.form);
      if (!read.ok()) return read.status();
      dense = *std::move(read);
    }
    if (absl::Status status = CheckChoice(use.index, *dense); !status.ok()) return status;
    if (absl::Status status = copy.Rebuild(dense->view()); !status.ok()) return status;
    rebuilt_ = true;
    for (size_t first = 0; first < edit.elements.size(); first += kPieceEdits) {
      const auto done = copy.EditInPlace(AsDone(served(edit.elements.subspan(first, kPieceEdits))),
                                         ResidentWeight::Zeros::kMayStay, patcher_);
      if (!done.ok()) return done.status();
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Tensor>> WeightEditor::ReadServed(
    const std::string& name, const graph::Initializer& initializer, bool transposed,
    const ServedForm& form) const {
  if (!after_.Has(name))
    return absl::FailedPreconditionError("the new weights do not have this tensor");
  auto tensor = Tensor::Allocate(initializer.dtype, initializer.shape);
  if (!tensor.ok()) return tensor.status();
  if (absl::Status status = after_.Read(name, *tensor); !status.ok()) return status;
  if (transposed) {
    tensor = graph::TransposedMatrix(*tensor);
    if (!tensor.ok()) return tensor.status();
  }
  return form.Apply(std::make_shared<const Tensor>(*std::move(tensor)));
}

// By the rules of a load, which without measuring are a function of the weight.
absl::Status WeightEditor::CheckChoice(int weight, const Tensor& dense) const {
  if (!options_.deterministic) return absl::OkStatus();
  auto structure = sparse::AnalyzeStructure(dense.view());
  if (!structure.ok()) return structure.status();
  for (const graph::LinearOp* linear : program_.linears) {
    if (linear->weight() != weight) continue;
    std::vector<int64_t> tokens;
    for (const int64_t batch : planned_.buckets)
      tokens.push_back(batch * linear->tokens_per_item());
    const CostTable table = ListOptions(*structure, std::move(tokens), device_);
    const std::vector<int> choice =
        ChooseOptions(table, options_.weight_memory, options_.deterministic, dense.bytes());
    for (size_t b = 0; b < planned_.buckets.size(); ++b) {
      const PlannedLayer& layer = planned_.layers[b][linear->layer()];
      if (!choice.empty() && table.options[choice[b]].variant == layer.variant &&
          table.options[choice[b]].layout.spec == layer.weight->spec())
        continue;
      return absl::UnimplementedError(absl::StrCat("its structure calls for another layout than ",
                                                   sparse::ToString(layer.weight->spec()),
                                                   "; prepare the model anew"));
    }
  }
  return absl::OkStatus();
}

absl::Status WeightEditor::EditConstant(const TensorEdit& edit,
                                        const graph::Initializer& initializer, int value) {
  const DType storage = program_.values[value].storage;
  const auto width = static_cast<int64_t>(SizeOf(storage));
  for (size_t first = 0; first < edit.elements.size(); first += kPieceEdits) {
    const auto piece = edit.elements.subspan(first, kPieceEdits);
    Edits edits(piece.begin(), piece.end());
    ServedForm{initializer.dtype, storage, false}.Apply(absl::MakeSpan(edits));
    std::vector<kernels::ElementPatch> patches;
    for (const ElementEdit& element : edits)
      patches.push_back({element.position * width, element.old_bits, element.new_bits});
    auto unexpected = patcher_.Patch(constant_memory_(value), static_cast<int32_t>(width), patches);
    if (!unexpected.ok()) return unexpected.status();
    if (*unexpected >= 0) {
      return absl::FailedPreconditionError(absl::StrCat("element ", edits[*unexpected].position,
                                                        " is not what it is to be changed from"));
    }
  }
  return absl::OkStatus();
}

}  // namespace espalier::planner
