#include "engine/planner/weight_editor.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/graph/ops/linear.h"
#include "engine/planner/choose.h"
#include "engine/planner/cost_table.h"
#include "engine/planner/plan_drift.h"
#include "engine/sparse/structure.h"
#include "engine/sparse/weight_elements.h"

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

// Non-zeros that come or go.
int64_t CountMoved(absl::Span<const ElementEdit> edits, DType dtype) {
  const uint32_t magnitude = ~sparse::FloatBitsOf(dtype).sign;
  return std::count_if(edits.begin(), edits.end(), [&](const ElementEdit& edit) {
    return ((edit.old_bits & magnitude) != 0) != ((edit.new_bits & magnitude) != 0);
  });
}

absl::Status In(const std::string& tensor, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("tensor '", tensor, "': ", status.message()));
}

}  // namespace

absl::Status WeightEditor::Begin(const std::string& tensor) {
  const auto it = program_.initializers.find(tensor);
  if (it == program_.initializers.end() || it->second.derived ||
      (it->second.weights.empty() && it->second.values.empty())) {
    return absl::UnimplementedError(absl::StrCat(
        "tensor '", tensor, "' did not go into the model element by element; prepare it anew"));
  }
  const auto elements = ElementCount(it->second.shape);
  if (!elements.ok()) return In(tensor, elements.status());
  tensor_ = tensor;
  initializer_ = &it->second;
  elements_ = *elements;
  last_ = -1;
  return absl::OkStatus();
}

absl::Status WeightEditor::Apply(const TensorEdit& piece) {
  if (initializer_ == nullptr || piece.tensor != tensor_) {
    if (absl::Status status = RebuildUnfit(); !status.ok()) return status;
    if (absl::Status status = Begin(piece.tensor); !status.ok()) return status;
  }
  absl::Status status = Validate(piece);
  for (const auto& use : initializer_->weights) {
    if (status.ok()) status = EditWeight(piece, use);
  }
  for (const auto& use : initializer_->values) {
    if (status.ok()) status = EditConstant(piece, use.index);
  }
  return In(tensor_, status);
}

absl::Status WeightEditor::Finish() {
  if (absl::Status status = RebuildUnfit(); !status.ok()) return status;
  return rebuilt_ ? rebind_() : absl::OkStatus();
}

absl::Status WeightEditor::Validate(const TensorEdit& piece) {
  for (const ElementEdit& element : piece.elements) {
    if (element.position <= last_ || element.position >= elements_) {
      return absl::InvalidArgumentError(absl::StrCat("position ", element.position, " after ",
                                                     last_, ", of ", elements_,
                                                     " elements: positions must ascend"));
    }
    last_ = element.position;
  }
  return absl::OkStatus();
}

absl::Status WeightEditor::EditWeight(const TensorEdit& piece, const graph::Initializer::Use& use) {
  PlannedWeight& weight = planned_.weights[use.index];
  const auto zeros =
      options_.deterministic ? ResidentWeight::Zeros::kAsEncoded : ResidentWeight::Zeros::kMayStay;
  for (size_t first = 0; first < piece.elements.size(); first += kPieceEdits) {
    const auto part = piece.elements.subspan(first, kPieceEdits);
    Edits edits = use.transposed ? Transposed(part, initializer_->shape[0], initializer_->shape[1])
                                 : Edits(part.begin(), part.end());
    weight.form.Apply(absl::MakeSpan(edits));
    weight.moved += CountMoved(edits, weight.form.served);
    for (const auto& copy : weight.copies) {
      const auto fit = copy->EditInPlace(edits, zeros, patcher_);
      if (!fit.ok()) return fit.status();
      if (!*fit) unfit_.insert(copy.get());
    }
  }
  return absl::OkStatus();
}

absl::Status WeightEditor::RebuildUnfit() {
  absl::Status status;
  for (size_t i = 0; !unfit_.empty() && status.ok() && i < initializer_->weights.size(); ++i)
    status = RebuildUnfit(initializer_->weights[i]);
  return In(tensor_, status);
}

absl::Status WeightEditor::RebuildUnfit(const graph::Initializer::Use& use) {
  const PlannedWeight& weight = planned_.weights[use.index];
  std::shared_ptr<const Tensor> dense;
  for (const auto& copy : weight.copies) {
    if (unfit_.erase(copy.get()) == 0) continue;
    if (dense == nullptr) {
      auto read = ReadServed(after_, tensor_, *initializer_, use.transposed, weight.form);
      if (!read.ok()) return read.status();
      dense = *std::move(read);
    }
    if (absl::Status status = CheckChoice(use.index, *dense); !status.ok()) return status;
    if (absl::Status status = copy->Rebuild(dense->view()); !status.ok()) return status;
    rebuilt_ = true;
  }
  return absl::OkStatus();
}

// By the rules of a load, which without measuring are a function of the weight.
absl::Status WeightEditor::CheckChoice(int weight, const Tensor& dense) const {
  if (!options_.deterministic) return absl::OkStatus();
  auto structure = sparse::AnalyzeStructure(dense.view());
  if (!structure.ok()) return structure.status();
  for (const graph::LinearOp* linear : program_.linears) {
    if (linear->weight() != weight) continue;
    const CostTable table = ListOptions(*structure, TokensOf(*linear, planned_.buckets), device_);
    const std::vector<int> choice =
        ChooseOptions(table, options_.weight_memory, options_.deterministic, dense.bytes());
    if (RunsWith(planned_, linear->layer(), table, choice)) continue;
    return absl::UnimplementedError(
        absl::StrCat("its structure calls for another layout than ",
                     sparse::ToString(planned_.layers[0][linear->layer()].weight->spec()),
                     "; prepare the model anew"));
  }
  return absl::OkStatus();
}

absl::Status WeightEditor::EditConstant(const TensorEdit& piece, int value) {
  const DType storage = program_.values[value].storage;
  const auto width = static_cast<int64_t>(SizeOf(storage));
  for (size_t first = 0; first < piece.elements.size(); first += kPieceEdits) {
    const auto part = piece.elements.subspan(first, kPieceEdits);
    Edits edits(part.begin(), part.end());
    ServedForm{initializer_->dtype, storage, false}.Apply(absl::MakeSpan(edits));
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
