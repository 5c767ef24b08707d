#include <iostream>
#include <optional>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "clients/cli/command.h"
#include "clients/cli/model_file.h"
#include "engine/formats/reader.h"
#include "engine/sparse/structure_report.h"

namespace espalier::cli {
namespace {

using formats::ModelGraph;
using formats::Node;

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

absl::StatusOr<Tensor> Transposed(const Tensor& matrix) {
  const int64_t rows = matrix.shape()[0], columns = matrix.shape()[1];
  absl::StatusOr<Tensor> result = Tensor::Allocate(matrix.dtype(), {columns, rows});
  if (!result.ok()) return result.status();
  if (SizeOf(matrix.dtype()) == sizeof(uint32_t)) {
    TransposeElements(matrix.As<uint32_t>(), result->As<uint32_t>(), rows, columns);
  } else {
    TransposeElements(matrix.As<uint16_t>(), result->As<uint16_t>(), rows, columns);
  }
  return result;
}

// A matrix of the file, seen as W of y = x · Wᵀ, [out, in].
struct Weight {
  std::string name;
  bool stored_transposed = false;  // the file has [in, out]
};

// Weights in the order in which they are used.
std::vector<Weight> WeightsOf(const ModelGraph& graph) {
  std::vector<Weight> weights;
  absl::flat_hash_set<std::string> seen;
  for (const Node& node : graph.nodes) {
    if ((node.op_type != "Gemm" && node.op_type != "MatMul") || node.inputs.size() < 2) continue;
    const auto found = graph.initializers.find(node.inputs[1]);
    if (found == graph.initializers.end() || found->second.shape().size() != 2) continue;
    if (!IsFloat(found->second.dtype()) || !seen.insert(found->first).second) continue;
    const auto trans_b = node.attributes.find("transB");
    const auto* flag =
        trans_b == node.attributes.end() ? nullptr : std::get_if<int64_t>(&trans_b->second);
    weights.push_back({found->first, flag == nullptr || *flag == 0});
  }
  return weights;
}

absl::StatusOr<sparse::NamedStructure> Analyze(const ModelGraph& graph, const Weight& weight,
                                               const sparse::StructureOptions& options) {
  const Tensor& stored = graph.initializers.at(weight.name);
  Tensor turned;
  if (weight.stored_transposed) {
    absl::StatusOr<Tensor> transposed = Transposed(stored);
    if (!transposed.ok()) return transposed.status();
    turned = *std::move(transposed);
  }
  auto structure =
      sparse::AnalyzeStructure((weight.stored_transposed ? turned : stored).view(), options);
  if (!structure.ok()) {
    return absl::Status(structure.status().code(),
                        absl::StrCat(weight.name, ": ", structure.status().message()));
  }
  return sparse::NamedStructure{weight.name, *std::move(structure)};
}

absl::Status Run(const Args& args) {
  absl::StatusOr<ModelFile> file = FindModel(args.positional()[0]);
  if (!file.ok()) return file.status();
  absl::StatusOr<ModelGraph> graph = formats::ReadModel(file->path);
  if (!graph.ok()) return graph.status();
  std::vector<sparse::NamedStructure> structures;
  for (const Weight& weight : WeightsOf(*graph)) {
    auto structure = Analyze(*graph, weight, {.flush_subnormals = args.Has("flush_subnormals")});
    if (!structure.ok()) return structure.status();
    structures.push_back(*std::move(structure));
  }
  if (args.Has("json")) {
    std::cout << sparse::StructureJson(structures) << "\n";
    return absl::OkStatus();
  }
  std::cout << file->path << ": " << structures.size() << " weights of linear layers among "
            << graph->initializers.size() << " constants\n";
  if (!structures.empty()) std::cout << "\n" << sparse::StructureTable(structures);
  return absl::OkStatus();
}

}  // namespace

Command InspectCommand() {
  return {
      {.name = "inspect",
       .summary = "what the zeros of a model file look like, and what each layout would take",
       .arguments = "MODEL",
       .min_positional = 1,
       .max_positional = 1,
       .flags =
           {
               {"flush_subnormals", "",
                "Count values below the smallest normal number as zeros, as a server does for a "
                "model\n"
                "whose config.pbtxt sets flush_subnormals."},
               {"json", "", "Print JSON instead of a table."},
           },
       .details =
           R"(MODEL is an .onnx file, a version directory or a model's directory. No server is needed. Every
weight of a linear layer (Gemm, MatMul) is shown as W [out, in] of y = x · Wᵀ, however it is stored.

Examples:
  espalier inspect tests/data/models/mnist_diagonal16
  espalier inspect model.onnx --json)"},
      &Run};
}

}  // namespace espalier::cli
