#include "clients/cli/linear_weights.h"

#include <cstring>

#include "absl/container/flat_hash_set.h"

namespace espalier::cli {
namespace {

bool IsFloat(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

template <typename T>
void TransposeElements(const T* from, T* to, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column)
      to[column * rows + row] = from[row * columns + column];
  }
}

}  // namespace

absl::StatusOr<Tensor> LinearWeight::Matrix() const {
  absl::StatusOr<Tensor> matrix = Tensor::Allocate(stored->dtype(), {out(), in()});
  if (!matrix.ok()) return matrix.status();
  if (!stored_transposed) {
    std::memcpy(matrix->data(), stored->data(), stored->bytes());
  } else if (SizeOf(stored->dtype()) == sizeof(uint32_t)) {
    TransposeElements(stored->As<uint32_t>(), matrix->As<uint32_t>(), in(), out());
  } else {
    TransposeElements(stored->As<uint16_t>(), matrix->As<uint16_t>(), in(), out());
  }
  return matrix;
}

std::vector<LinearWeight> LinearWeightsOf(const formats::ModelGraph& graph) {
  std::vector<LinearWeight> weights;
  absl::flat_hash_set<std::string> seen;
  for (const formats::Node& node : graph.nodes) {
    if ((node.op_type != "Gemm" && node.op_type != "MatMul") || node.inputs.size() < 2) continue;
    const auto found = graph.initializers.find(node.inputs[1]);
    if (found == graph.initializers.end() || found->second.shape().size() != 2) continue;
    if (!IsFloat(found->second.dtype()) || !seen.insert(found->first).second) continue;
    const auto trans_b = node.attributes.find("transB");
    const auto* flag =
        trans_b == node.attributes.end() ? nullptr : std::get_if<int64_t>(&trans_b->second);
    weights.push_back({found->first, &found->second, flag == nullptr || *flag == 0});
  }
  return weights;
}

}  // namespace espalier::cli
