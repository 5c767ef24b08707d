#include "engine/planner/served_form.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/graph/ops/transpose.h"
#include "engine/sparse/structure.h"
#include "engine/sparse/weight_elements.h"

namespace espalier::planner {
namespace {

constexpr size_t kChunk = 1024;

uint32_t Flushed(uint32_t bits, const sparse::FloatBits& format) {
  return (bits & ~format.sign) < format.smallest_normal ? bits & format.sign : bits;
}

// Through the conversion of whole tensors, which is the one that a load takes.
void ConvertBits(absl::Span<sparse::ElementEdit> edits, uint32_t sparse::ElementEdit::*bits,
                 DType from, DType to) {
  const size_t from_size = SizeOf(from), to_size = SizeOf(to);
  alignas(8) char elements[kChunk * 4], converted[kChunk * 4];
  for (size_t i = 0; i < edits.size(); ++i)
    std::memcpy(elements + i * from_size, &(edits[i].*bits), from_size);
  ConvertElements(elements, from, converted, to, static_cast<int64_t>(edits.size()));
  for (size_t i = 0; i < edits.size(); ++i) {
    edits[i].*bits = 0;
    std::memcpy(&(edits[i].*bits), converted + i * to_size, to_size);
  }
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Tensor>> ServedForm::Apply(
    std::shared_ptr<const Tensor> tensor) const {
  if (file == served && !flush_subnormals) return tensor;
  auto copy = Convert(tensor->view(), served);
  if (!copy.ok()) return copy.status();
  if (flush_subnormals) sparse::FlushSubnormals(*copy);
  return std::make_shared<const Tensor>(*std::move(copy));
}

void ServedForm::Apply(absl::Span<sparse::ElementEdit> edits) const {
  const sparse::FloatBits format = sparse::FloatBitsOf(served);
  for (size_t first = 0; first < edits.size(); first += kChunk) {
    const auto chunk = edits.subspan(first, kChunk);
    for (uint32_t sparse::ElementEdit::*bits :
         {&sparse::ElementEdit::old_bits, &sparse::ElementEdit::new_bits}) {
      if (file != served) ConvertBits(chunk, bits, file, served);
      if (!flush_subnormals) continue;
      for (sparse::ElementEdit& edit : chunk) edit.*bits = Flushed(edit.*bits, format);
    }
  }
}

absl::StatusOr<std::shared_ptr<const Tensor>> ReadServed(const formats::WeightSource& weights,
                                                         const std::string& name,
                                                         const graph::Initializer& initializer,
                                                         bool transposed, const ServedForm& form) {
  if (!weights.Has(name))
    return absl::FailedPreconditionError("the new weights do not have this tensor");
  auto tensor = Tensor::Allocate(initializer.dtype, initializer.shape);
  if (!tensor.ok()) return tensor.status();
  if (absl::Status status = weights.Read(name, *tensor); !status.ok()) return status;
  if (transposed) {
    tensor = graph::TransposedMatrix(*tensor);
    if (!tensor.ok()) return tensor.status();
  }
  return form.Apply(std::make_shared<const Tensor>(*std::move(tensor)));
}

}  // namespace espalier::planner
