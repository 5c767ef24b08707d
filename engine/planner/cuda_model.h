// cuda_model.h — a prepared model on a GPU, behind the same interface as on the CPU.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "engine/graph/program.h"
#include "engine/planner/prepared_model.h"
#include "engine/tensor/cuda_device.h"

namespace espalier::planner {

// What floats of `program` are computed in on a GPU under `precision`.
DType ComputeType(const graph::Program& program, formats::Precision precision);

// Plans, uploads and binds; errors as PreparedModel::Prepare. The device outlives the model.
absl::StatusOr<std::unique_ptr<PreparedModel>> PrepareOnCuda(graph::Program program,
                                                             const CudaDevice& device,
                                                             const PrepareOptions& options);

}  // namespace espalier::planner
