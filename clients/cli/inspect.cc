#include <iostream>

#include "absl/strings/str_cat.h"
#include "clients/cli/command.h"
#include "clients/cli/linear_weights.h"
#include "clients/cli/model_file.h"
#include "engine/formats/reader.h"
#include "engine/sparse/structure_report.h"

namespace espalier::cli {
namespace {

using formats::ModelGraph;

absl::StatusOr<sparse::NamedStructure> Analyze(const LinearWeight& weight,
                                               const sparse::StructureOptions& options) {
  absl::StatusOr<Tensor> matrix = weight.Matrix();
  if (!matrix.ok()) return matrix.status();
  auto structure = sparse::AnalyzeStructure(matrix->view(), options);
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
  for (const LinearWeight& weight : LinearWeightsOf(*graph)) {
    auto structure = Analyze(weight, {.flush_subnormals = args.Has("flush_subnormals")});
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
